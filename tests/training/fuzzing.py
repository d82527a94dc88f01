"""How long tests of properties look for what breaks them: the same examples each time."""

from hypothesis import HealthCheck, settings

quick = settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
thorough = settings(quick, max_examples=300)
