PYTHON ?= python3

# Tests and the demo build their models and data in memory; whatever still asks the Hub should fail, not wait.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

# The oldest supported transformers, with the newest of what it cannot share with the pins in constraints.txt.
OLDEST := transformers==5.4.0 huggingface_hub==1.33.0 tokenizers==0.22.2
OLDEST_TESTS := tests/test_nonfinite.py tests/test_healthy.py tests/test_exceptions.py tests/test_rollback.py \
	tests/test_learning_rate.py tests/test_memory.py

.PHONY: demo test test-slow test-oldest lint

demo: .venv/.installed
	.venv/bin/self-healing demo

# What is timed runs by itself.
test: lint
	.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow and not gpu and not alone"
	.venv/bin/python -m pytest -m alone

test-slow: .venv/.installed
	.venv/bin/python -m pytest -m "slow and not gpu"

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest $(OLDEST_TESTS)

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# torch goes first and alone: its index may hold several builds, and with it in place nothing else picks another one.
# What is uninstalled is this project under the name it had first; the command would be that one's.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	-.venv/bin/python -m pip uninstall -q -y self-healing
	.venv/bin/python -m pip install torch==2.13.0 -c constraints.txt
	.venv/bin/python -m pip install -e '.[dev]' -c constraints.txt
	touch $@

.venv-oldest/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv-oldest
	-.venv-oldest/bin/python -m pip uninstall -q -y self-healing
	grep -v $(foreach pin,$(OLDEST),-e '^$(firstword $(subst ==, ,$(pin)))==') constraints.txt \
		> .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install torch==2.13.0 -c .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install -e '.[dev]' $(OLDEST) -c .venv-oldest/constraints.txt
	touch $@
