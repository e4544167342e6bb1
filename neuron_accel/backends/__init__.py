"""How collectives and devices are done: one small interface, several implementations."""
