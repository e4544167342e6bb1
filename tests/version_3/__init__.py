"""Plugins of version 3 of the contract as they were published: of the cookbook, the guide and a package."""
