"""How long tests of properties look for what breaks them: the same examples each time."""

from datetime import timedelta

from hypothesis import HealthCheck, settings

quick = settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=10),
    suppress_health_check=list(HealthCheck),
)
thorough = settings(quick, max_examples=300)
