PYTHON ?= python3

# Tests and the demo build their models and data in memory; whatever still asks the Hub should fail, not wait.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
# Tests start dozens of processes, each of which would compile the package and the tests once more.
export PYTHONDONTWRITEBYTECODE :=

# The oldest supported transformers, with the newest of what it cannot share with the pins in constraints.txt.
OLDEST := transformers==5.4.0 huggingface_hub==1.33.0 tokenizers==0.22.2
OLDEST_TESTS := tests/numerics/test_nonfinite.py tests/test_healthy.py tests/instrument/test_exceptions.py tests/rollback/test_rollback.py \
	tests/numerics/test_learning_rate.py tests/memory/test_memory.py

# The newest of what trains, whatever constraints.txt pins, and of what only comes with it.
NEWEST := transformers trl accelerate datasets peft
NEWEST_FREE := $(NEWEST) huggingface_hub tokenizers safetensors
NEWEST_TESTS := $(OLDEST_TESTS) tests/memory/test_calls.py tests/memory/test_microbatches.py

# On a machine with a GPU, whose own Python has torch for it; `make gpu-needs` says what else it lacks.
GPU_PYTHON ?= python3
GPU_TESTS := tests/test_healthy.py tests/numerics/test_nonfinite.py tests/rollback/test_rollback.py

# One more than there are cores: what waits for another rank, or for a thread that sleeps, leaves its core to the rest.
WORKERS := $(shell $(PYTHON) -c "import os; print(min((os.cpu_count() or 1) + 1, 5))")

# Modules are compiled when they are first imported; all of them at once would take 40 seconds of each environment.
INSTALL := -m pip install --no-compile

.PHONY: bench bench-all contract contract-whole demo demo-output dist docs examples matrix smoke test test-quick test-slow test-deepspeed test-deepspeed-quick deepspeed-adam test-oldest test-newest test-gpu test-gpu-cases test-gpu-fp32 test-gpu-bf16 bench-gpu gpu-needs gpu-wheels lint

demo: .venv/.installed
	.venv/bin/self-healing demo

# What it prints in a terminal, into docs/img.
demo-output: .venv/.installed
	.venv/bin/python tests/demo_output.py

# All that a change has to pass, two at a time: neither lint nor a rank that waits for the other one fills a machine.
test: .venv/.installed
	$(MAKE) -j 2 lint test-quick test-deepspeed-quick

# Of each kind of fault, trainer, setting and launcher one; further members of a kind are left to `make test-slow`.
test-quick: .venv/.installed
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

# What a user relies on, whatever is rebuilt below it: what is quick, and all of it.
contract: .venv/.installed
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "contract and not slow and not gpu"

contract-whole: .venv/.installed
	.venv/bin/python -m pytest -m "contract and not gpu"

test-slow: .venv/.installed
	.venv/bin/python -m pytest -m "slow and not gpu"

# Every example as a user runs it, offline: some two minutes of CPU time.
examples: .venv/.installed
	.venv/bin/python -m pytest -m slow tests/test_examples.py

# The tests that show what heals where, and the tables of it in the README and in docs; what fails is in them as well.
matrix: .venv/.installed
	-.venv/bin/python -m pytest -m heals --ignore-glob='*/ranks/test_faults_*' --ignore-glob='*/test_deepspeed.py' \
		--ignore-glob='*/test_zero_checkpoints.py' \
		--junit-xml=outputs/matrix.xml
	-$(MAKE) test-deepspeed DEEPSPEED_OPTIONS=--junit-xml=outputs/deepspeed.xml
	-.venv/bin/python -m pytest -m "slow or not slow" tests/ranks/test_faults_*.py --junit-xml=outputs/ranks.xml
	.venv/bin/python tests/matrix.py outputs/matrix.xml outputs/deepspeed.xml outputs/ranks.xml

# Of DeepSpeed's operations the one that offload on a GPU takes: minutes, so it is not built by itself.
deepspeed-adam: .venv-deepspeed/.installed
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$(CURDIR)/.venv-deepspeed/extensions" PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" \
		.venv-deepspeed/bin/python -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"

# ZeRO on two processes, without a GPU: DeepSpeed builds nothing for it, and is built in less than a minute.
test-deepspeed: .venv-deepspeed/.installed
	PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" TORCH_EXTENSIONS_DIR="$(CURDIR)/.venv-deepspeed/extensions" \
		.venv-deepspeed/bin/python -m pytest -m "not gpu" -k "deepspeed or zero" tests/instrument/test_deepspeed.py \
		tests/checkpoints/test_zero_checkpoints.py tests/restarts/test_memory_start_zero.py \
		tests/ranks/test_faults_*.py $(DEEPSPEED_OPTIONS)

# Of both kinds of optimizer that DeepSpeed has for ZeRO, what is healed inside a step: a minute.
test-deepspeed-quick: .venv-deepspeed/.installed
	PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" .venv-deepspeed/bin/python -m pytest tests/instrument/test_deepspeed.py

# Both then put the versions with which their tests have passed into docs/compatibility.json, and its table into a page.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest $(OLDEST_TESTS)
	.venv-oldest/bin/python tests/compatibility.py oldest

test-newest: .venv-newest/.installed
	.venv-newest/bin/python -m pytest $(NEWEST_TESTS)
	.venv-newest/bin/python tests/compatibility.py newest

# Each part writes its result as it goes; what was cut off is gone on with when it is called again.
# What becomes of a run that faults strike, plain and healed: SFT, one seed, and the page of it.
bench: .venv/.installed
	.venv/bin/python -m pip install --quiet ckpt-chaos -c constraints.txt
	.venv/bin/python benchmarks/survival.py --anew
	.venv/bin/python benchmarks/kill_points.py --anew
	.venv/bin/python benchmarks/goodput.py --anew
	.venv/bin/python benchmarks/recovery.py
	.venv/bin/python benchmarks/page.py

# All trainers, tools, rates and seeds, and what a step costs: hours. Each part goes on where it was left.
bench-all: .venv/.installed .venv-deepspeed/.installed
	.venv/bin/python benchmarks/survival.py --all
	.venv/bin/python -m pip install --quiet ckpt-chaos -c constraints.txt
	.venv/bin/python benchmarks/kill_points.py --all
	.venv/bin/python benchmarks/goodput.py --all
	.venv/bin/python benchmarks/recovery.py
	.venv/bin/python benchmarks/growth.py --all
	.venv/bin/python benchmarks/detectors.py
	.venv/bin/python benchmarks/counts.py
	.venv/bin/python benchmarks/memory.py cost
	.venv/bin/python benchmarks/memory.py throughput
	.venv/bin/python benchmarks/snapshots.py
	.venv/bin/python benchmarks/restarts.py
	.venv/bin/python benchmarks/overhead.py
	.venv/bin/python benchmarks/overhead.py --accumulation 8 --duets 16 --turns 8 \
		--output benchmarks/results/overhead_accumulated_cpu.json
	.venv/bin/python benchmarks/ranks.py
	.venv/bin/python benchmarks/ranks.py --strategy fsdp2
	PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" .venv-deepspeed/bin/python benchmarks/ranks.py --strategy zero2
	.venv/bin/python benchmarks/page.py

bench-gpu: gpu-needs
	$(GPU_PYTHON) benchmarks/gpu.py run

# All of them, whatever the first ones say: the machine is lent for a short time.
test-gpu: gpu-needs
	$(MAKE) -k test-gpu-cases test-gpu-fp32 test-gpu-bf16

test-gpu-cases:
	$(GPU_PYTHON) -m pytest -m gpu tests/test_gpu_bench.py tests/memory/test_memory_gpu.py

test-gpu-fp32:
	TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest $(GPU_TESTS)

test-gpu-bf16:
	TEST_DEVICE=cuda TEST_PRECISION=bf16 $(GPU_PYTHON) -m pytest $(GPU_TESTS)

gpu-needs:
	$(GPU_PYTHON) benchmarks/gpu.py needs

# Where there is a network: what such a machine lacks, for Python 3.12 on x86-64, into .whl.
gpu-wheels:
	$(GPU_PYTHON) benchmarks/gpu.py wheels

# The wheel and the source distribution.
dist: .venv/.installed
	rm -rf dist
	.venv/bin/python -m build --no-isolation

# Builds them, and runs what a user would in an environment that has nothing else.
smoke: .venv/.installed
	.venv/bin/python -m pytest -m slow tests/test_distribution.py

# The site, into outputs/site: a link that leads nowhere, or a page that is in no menu, is an error.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# torch goes first and alone: its index may hold several builds, and with it in place nothing else picks another one.
# What is uninstalled is this project under the name it had first; the command would be that one's.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	-.venv/bin/python -m pip uninstall -q -y self-healing
	.venv/bin/python $(INSTALL) torch==2.13.0 -c constraints.txt
	.venv/bin/python $(INSTALL) -e '.[dev]' -c constraints.txt
	touch $@

.venv-oldest/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv-oldest
	-.venv-oldest/bin/python -m pip uninstall -q -y self-healing
	grep -v $(foreach pin,$(OLDEST),-e '^$(firstword $(subst ==, ,$(pin)))==') constraints.txt \
		> .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(INSTALL) torch==2.13.0 -c .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(INSTALL) -e '.[dev]' $(OLDEST) -c .venv-oldest/constraints.txt
	touch $@

.venv-newest/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv-newest
	grep -v $(foreach name,$(NEWEST_FREE),-e '^$(name)==') constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python $(INSTALL) torch==2.13.0 -c .venv-newest/constraints.txt
	.venv-newest/bin/python $(INSTALL) --upgrade -e '.[dev]' $(NEWEST) -c .venv-newest/constraints.txt
	touch $@

# On top of .venv, whose torch it is built for: a second one would take two minutes.
.venv-deepspeed/.installed: .venv/.installed
	$(PYTHON) -m venv .venv-deepspeed
	.venv/bin/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$(.venv-deepspeed/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
	.venv-deepspeed/bin/python $(INSTALL) setuptools wheel ninja -c constraints.txt
	DS_BUILD_OPS=0 PATH="$(CURDIR)/.venv-deepspeed/bin:$$PATH" \
		.venv-deepspeed/bin/python $(INSTALL) --no-build-isolation deepspeed -c constraints.txt
	touch $@

.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(INSTALL) mkdocs-material -c constraints.txt
	touch $@
