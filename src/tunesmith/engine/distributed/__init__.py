"""Training in several processes: what each rank computes, what ranks exchange, and how they start and end."""
