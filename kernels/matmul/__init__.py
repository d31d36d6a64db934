"""Matrix products with what a ViT does around them: biases, activations, residuals, gates."""
