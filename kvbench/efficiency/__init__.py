"""What a decode step costs: time, memory and the floor under both. Nothing here asks what a model says."""
