from hypothesis import settings

# The same examples on every run, and no limit on the time of one: the first call of an operation can be slow.
settings.register_profile("qlangevin", deadline=None, derandomize=True)
settings.load_profile("qlangevin")
