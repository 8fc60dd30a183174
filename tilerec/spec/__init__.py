"""What a user says and what a plan says: frozen records, no tensors."""
