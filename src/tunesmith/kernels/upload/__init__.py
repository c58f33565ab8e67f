"""A batch on its way to the device: one copy for all of its fields."""
