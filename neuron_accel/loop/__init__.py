"""What ``NeuronAccelerator`` does in order: prepare, a step, the objects that a loop holds, values of several ranks."""
