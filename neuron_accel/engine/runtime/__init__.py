"""The state of one run, and what ranks do together."""
