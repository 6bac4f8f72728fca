"""How a network is converted: copied, traced, planned, and changed in place."""
