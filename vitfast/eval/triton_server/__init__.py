"""A ViT's embeddings as a model of NVIDIA's Triton Inference Server."""
