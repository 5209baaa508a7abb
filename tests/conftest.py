"""What every test shares: a cache of its own, so that no test is answered by another's result or by the user's."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSTUNE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
