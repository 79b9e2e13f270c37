"""KVpop's smallest scorer: a token's priority is a linear function of its own key and value."""
