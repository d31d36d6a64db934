"""The ViT, its parts and its weights."""
