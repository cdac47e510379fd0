"""The same examples in every run, and no time limit on a single one: a slow machine is no failure."""

from hypothesis import settings

settings.register_profile("petals_async", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("petals_async")
