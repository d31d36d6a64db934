"""Training: recipes are data, the loop is one class.

Needs the extra `train`: pip install '.[train]' in a checkout.
"""
