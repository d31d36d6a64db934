"""Looking inside a model: its filters, positions and attention, as numbers and as figures."""
