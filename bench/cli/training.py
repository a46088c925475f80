def add_verbs(app): pass
