"""Parts that few people use, found through the registries; the core imports nothing of them."""
