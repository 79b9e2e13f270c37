"""Programs that run inside a box. They are sent there as text; nothing outside runs them."""
