"""Images: what data sets there are, and how they become batches of raw uint8 pixels."""
