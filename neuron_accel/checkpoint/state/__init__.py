"""What a run saves and loads."""
