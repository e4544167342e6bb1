"""Pipeline parallelism: schedules as data, models cut into stages, and what runs the one over the other."""
