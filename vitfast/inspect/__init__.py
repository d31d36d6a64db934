"""What a model learned: its filters, positions and attention, as numbers and as figures."""
