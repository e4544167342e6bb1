"""Pipeline parallelism: schedules as data, models split into stages, and the runtime that executes a schedule."""
