"""The public names, and who may import what (DESIGN, sections 3 and 7)."""

import ast
import importlib
import inspect
import pathlib
import subprocess
import sys

import pytest

import jkv

PACKAGE = pathlib.Path(jkv.__file__).parent

# DESIGN section 3: the names that carry no number, or that of work that is done.
PUBLIC = """
    Buffer kv_buffers latent_buffers AttentionLayer RecurrentLayer DeviceTier HostTier StoreTier
    CacheConfig WindowScratch Tokens BatchShape SequenceShape
    CacheState append attend append_attend gather read_state write_state pool with_pool table_for slots_for
    candidate_slots Ragged Transfer export_pages import_pages
    CacheManager CacheStats Event Sequence Status Match Scope
    CacheError ConfigError OutOfPagesError SequenceStateError IntegrityError StoreError
""".split()

# DESIGN section 7: what each file may import from jkv.
BELOW = {
    "errors": "",
    "stats": "layout config errors",
    "config": "errors",
    "groups": "config",
    "sizing": "groups config errors",
    "layout": "sizing groups config errors",
    "pages": "layout errors",
    "plan": "layout errors",
    "radix": "layout config errors expiry",
    "retention": "radix pages layout errors expiry",
    "eviction": "retention radix pages plan layout config errors tiers.keys",
    "events": "config",
    "announcing": "events eviction radix pages plan layout config tiers.keys",
    "serial": "",
    "contents": "config tiers.keys",
    "routing": "contents eviction radix",
    "expiry": "",
    "ledger": "layout",
    "holdings": "eviction radix pages plan ledger layout config stats errors contents sizing expiry",
    "room": "holdings radix layout stats errors",
    "speculation": "room holdings radix errors",
    "suspension": "speculation radix pages layout errors",
    "arrivals": "holdings radix layout config tiers.keys",
    "sequence": (
        "suspension speculation arrivals holdings ledger radix config errors stats serial routing transfer expiry"
    ),
    "batches": "sequence holdings stats config errors",
    "resizing": "sequence holdings eviction radix pages layout errors",
    "integrity": "sequence arrivals holdings eviction radix pages layout errors",
    "state": "layout config errors",
    "ragged": "",
    "transfer": "",
    "ops": "ragged state layout config errors transfer",
    "attention": "ops ragged state layout config errors",
    "apply": "plan state layout errors",
    "tiers.failures": "",
    "tiers.keys": "",
    "tiers.values": "tiers.keys config layout",
    "tiers.index": "tiers.keys tiers.values",
    "tiers.store": "tiers.failures tiers.index tiers.keys tiers.values config errors layout",
    "tiers.host": "tiers.failures apply plan state layout errors",
}


def imports(module):
    """Full names of all that the file imports, wherever in it."""
    for node in ast.walk(ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_public_names():
    assert sorted(jkv.__all__) == sorted(PUBLIC)
    assert len(set(jkv.__all__)) == len(jkv.__all__)
    for name in PUBLIC:
        assert getattr(jkv, name).__module__.startswith("jkv.")


def test_public_names_have_docstrings_with_a_snippet_that_runs():
    """`pytest` runs them: pyproject collects the package's doctests."""
    lacking = []
    for name in PUBLIC:
        documented = {name: getattr(jkv, name)}
        if name in ("CacheManager", "Sequence"):
            members = vars(documented[name]).items()
            documented |= {f"{name}.{n}": f for n, f in members if inspect.isfunction(f) and not n.startswith("_")}
        lacking += [each for each, value in documented.items() if ">>> " not in (inspect.getdoc(value) or "")]
    assert not lacking


def test_a_star_import_gives_them():
    names = {}
    exec("from jkv import *", names)
    assert set(names) - {"__builtins__"} == set(PUBLIC)


@pytest.mark.parametrize(
    "module",
    [
        "radix",
        "expiry",
        "transfer",
        "sizing",
        "groups",
        "routing",
        "contents",
        "pages",
        "plan",
        "eviction",
        "events",
        "announcing",
        "suspension",
        "arrivals",
        "resizing",
        "tiers.keys",
        "holdings",
        "sequence",
        "retention",
        "integrity",
        "ledger",
        "room",
        "speculation",
        "batches",
    ],
)
def test_the_deciding_half_never_imports_jax(module):
    assert not [name for name in imports(module) if name.split(".")[0] in ("jax", "jaxlib", "chex", "flax")]


@pytest.mark.parametrize("module", BELOW)
def test_imports_point_one_way(module):
    found = {name.split(".", 1)[1].rsplit(".", 1)[0] for name in imports(module) if name.startswith("jkv.")}
    assert found <= set(BELOW[module].split())


def test_every_module_is_in_the_picture():
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert files == {*BELOW, "__init__", "tiers.__init__", "manager"}


def test_import_jkv_loads_neither_flax_nor_tensorstore():
    code = "import sys, jkv; print([n for n in ('flax', 'tensorstore', 'orbax', 'torch') if n in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120, check=True
    )
    assert run.stdout.strip() == "[]"


def test_import_jkv_initialises_no_backend():
    """`jax.distributed.initialize` and XLA flags must still be possible after `import jkv`."""
    code = "import jkv; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120, check=True
    )
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("name", sorted(path.stem for path in (PACKAGE.parent / "tests/benchmarks").glob("bench_*.py")))
def test_benchmarks_can_be_imported(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").main)
