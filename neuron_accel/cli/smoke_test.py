"""``neuron-accel env``."""

SUMMARY = DESCRIPTION = EXAMPLES = ""


def add_arguments(p):
    pass


def run(a):
    return 0
