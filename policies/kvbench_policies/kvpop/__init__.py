"""KVpop: priorities from an mLSTM that decides about a token when it leaves the window."""
