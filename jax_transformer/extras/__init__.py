"""What few people use, found through the registries; the core imports nothing of it."""
