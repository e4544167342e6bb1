"""The command ``neuron-accel``. Its modules are light: torch is imported by the functions that need it."""
