"""Training: recipes are data, the loop is one function. Needs the extra `train` (pip install 'vitfast[train]')."""
