"""Model sources: named models and how they are loaded. `plugin` announces the named ones."""
