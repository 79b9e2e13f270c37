"""Vocabulary and mathematics shared by every part. Import the submodule you need: this file stays empty of imports."""
