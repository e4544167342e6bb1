"""What a run will be: mesh, plugins, their order and owners, read from a configuration and explained. Pure."""
