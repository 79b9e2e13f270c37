"""KVpop's stateless scorer: a token's priority is a small network's function of its own key and value."""
