"""A model's filters, positions and attention, as numbers and as figures."""
