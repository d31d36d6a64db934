"""Softmax attention: forward and backward, with rotary positions, biases, packed samples."""
