# `make demo` and `make test` start from a bare checkout: Python 3.10 to 3.13, git and a C compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two processes on two cores: one thread each, or they get in each other's way. A third makes nothing sooner.
WORKERS ?= 2
TESTS ?= tests
# The exact versions that this Python is tested with, which `make locks` makes anew. LOCK=locks/lowest.txt: the oldest allowed.
LOCK = locks/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt

.PHONY: demo test arithmetic campaign cluster browser hostile clients clients-oldest image locks pages site lint format clean

demo: $(VENV)/.installed-demo
	$(BIN)/python -m longstride.launcher.demo

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

# Numerical tests once more under each arithmetic that this processor has; ARITHMETIC=--second: under one other alone.
arithmetic: $(VENV)/.installed-dev
	$(BIN)/python -m tests.harness.arithmetic $(ARITHMETIC) -n $(WORKERS) --dist worksteal \
		tests/kernels tests/sparse_model tests/launcher/compression

campaign: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not cluster and not browser and not clients"

# Hosts made of network namespaces, with the real launchers: by root, with what .ci/run installs.
cluster: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "cluster and not campaign"

# Pages in Debian's chromium, or what $$CHROMIUM names.
browser: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m browser

# What README and docs/tutorial show, run by the wheel in empty folders.
pages: $(VENV)/.installed-dev $(VENV)/.installed-serve
	$(BIN)/python -m pytest -m pages tests/test_pages.py

# Files, servers and accidents that mean harm, and wrong inputs: a sample of each class. `make campaign` has all of them.
hostile: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "hostile and not campaign" tests/hostile

# Exports, data, metrics and the server under packages that others wrote; docs/clients.md has the table that it makes.
clients: $(VENV)/.installed-clients
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m clients -p tests.harness.clients

# Exported models under the oldest packages that the extras of setup.py allow; `clients` brings its own back.
clients-oldest: $(VENV)/.installed-clients
	rm $<
	$(BIN)/python -m pip install --quiet transformers==5.23.0 onnx==1.19.0 onnxscript==0.7.0 onnxruntime==1.22.0
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m clients \
		tests/clients/test_generate.py tests/clients/test_hub_model.py tests/clients/test_peft.py \
		tests/clients/test_attention_in_transformers.py \
		tests/clients/test_torch_export.py

# The documents as pages with a search, and a page for each command, in build/site.
site: $(VENV)/.installed-dev $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The container of the Dockerfile, for CPUs: built, and asked to plan and to look at its machine. Needs a container engine.
image:
	docker build --tag longstride:cpu .
	docker run --rm longstride:cpu plan demo
	docker run --rm longstride:cpu doctor

locks: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python locks/make.py

lint: $(VENV)/.installed-dev
	$(BIN)/pre-commit run --all-files

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

# Installing again is due whenever what is to be installed changed. The checkout itself is installed in place.
$(VENV)/.installed: setup.py pyproject.toml $(wildcard locks/*.txt)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=23.1" # an older one gives DeepSpeed's scripts no interpreter
	$(BIN)/python -m pip install --quiet --constraint $(LOCK) --editable .
	touch $@

$(VENV)/.installed-clients: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[clients]"
	touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint $(LOCK) --editable ".[$*]"
	touch $@
