"""A ViT as a model of NVIDIA's Triton Inference Server: the repository's folder, and the model.py in it."""
