# On a fresh machine: `make demo`, `make test`. They need Python 3.11 or newer; all else is set up in .venv, once: with
# the newest Python that there is a build of PyTorch for. `make test PYTHON=python3.12` takes that one, in .venv-python3.12.
ifdef PYTHON
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
else
VENV := .venv
endif
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# a terminal sees what pip downloads and how far it is; elsewhere pip tells of errors only
install = test -t 1 || export PIP_QUIET=2; $(1)/python -m pip --disable-pip-version-check install
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
SWEEPS = $(if $(ROOMS),sweep and ($(foreach room,$(ROOMS),sweep(room='$(room)') or) not sweep),sweep)
TORCH := $(shell grep '^torch==' constraints.txt)
CUDA_BUILDS := 2.13.0 2.11.0 2.9.1
TRACES := tests/snapshots/traces

.PHONY: test-all sweeps
.PHONY: demo demo-trace page test test-pure operators builds dist bench lint format snapshots course site picture clean
.PRECIOUS: .venv-%/.ready
.DEFAULT_GOAL := demo

demo: $(READY)
	@$(BIN)/keepbusy run --clock modelled --values none examples/gpt_item.py
	@echo
	@echo "That was a small GPT, trained on an H200 that is not there. Next:"
	@echo "  fix the line (docs/tutorial/no-gpu.md walks through it), and run it again:"
	@echo "  $(BIN)/keepbusy run --clock modelled --values none examples/gpt_item.py"
	@echo "  $(BIN)/keepbusy run --clock modelled --values none examples/slow_loader.py    five more in examples/"
	@echo "  $(BIN)/keepbusy run YOUR_PROGRAM.py                                           your own, unchanged"
	@echo "  make demo-trace                                                              a real trace, explained"

demo-trace: $(READY)
	@cd $(TRACES) && $(CURDIR)/$(BIN)/keepbusy explain tokens.trace.json.gz --plain-step 53.047
	@echo
	@echo "That was a real trace of a few steps on an H200. Next:"
	@echo "  $(BIN)/keepbusy explain YOUR.trace.json.gz --plain-step MS    your own (docs/how-to/record-a-trace.md)"
	@echo "  $(BIN)/keepbusy explain $(TRACES)/images.trace.json.gz --plain-step 31.3 --what-if blocking_copy"
	@echo "  $(BIN)/keepbusy export $(TRACES)/images.trace.json.gz --to perfetto -o /tmp/run.json.gz"

# in two processes for two cores: each imports all tests and PyTorch, which takes half a minute of the processor, and
# hardly waits for what it starts; each takes the next file, so that what its tests share is made once; what is imported
# is compiled once, too, whatever the shell says
test: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SHARED) -m "not sweep"

# with the sweeps: the same mechanisms on many more programs
test-all: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SHARED)

# the sweeps alone, or those of some rooms of src/keepbusy: `make sweeps ROOMS="virtual log"`; a room may have none
sweeps: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SHARED) -m "$(SWEEPS)" || test $$? = 5

# what needs no PyTorch, on a Python that there may be no build of it for: `make test-pure PYTHON=python3.13`
test-pure: $(VENV)/.ready-pure
	@$(BIN)/python -m pytest $(SHARED) -m "not sweep" tests/pure

# all samples of PyTorch's own operator database on the virtual GPU; `make sweeps` takes one of each operator
operators: $(READY)
	@$(BIN)/python tests/torch/operator_sweep.py 1000

# the virtual GPU on PyPI's own builds of PyTorch, which have CUDA in them: each an environment of several gigabytes
builds: $(CUDA_BUILDS:%=build-%)

build-%: .venv-%/.ready
	@echo "PyTorch $*, with CUDA:"
	@.venv-$*/bin/python -m pytest tests/torch

.venv-%/.ready: pyproject.toml constraints.txt
	@echo "setting up: PyTorch $* with CUDA in .venv-$*, once: some gigabytes"
	@$(or $(PYTHON),$$(.ci/pythons torch==$*)) -m venv .venv-$*
	@$(call install,.venv-$*/bin) "torch===$*"
	@grep -v '^torch==' constraints.txt > .venv-$*/constraints.txt
	@$(call install,.venv-$*/bin) -c .venv-$*/constraints.txt -e '.[dev]'
	@touch $@

# a wheel and an sdist, as PyPI takes them
dist: $(READY)
	@echo "setting up: what builds and checks packages"
	@$(call install,$(BIN)) build twine hatchling
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/twine check --strict dist/*

bench: $(READY)
	@$(BIN)/python benchmarks/explain_speed.py

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

snapshots: $(READY)
	@KEEPBUSY_SNAPSHOTS=write $(BIN)/python -m pytest tests/snapshots
	@git diff --stat -- tests/snapshots examples

# what the programs of the course print, and the pictures of their timelines
course: $(READY)
	@$(BIN)/python docs/course/build.py
	@git diff --stat -- docs/course

# the documentation as a site, into site/
site: $(READY)
	@echo "setting up: what builds the site: 20 packages, 15 MB"
	@$(call install,$(BIN)) -c constraints.txt -e '.[site]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "open site/index.html"

pictures: picture
	@$(BIN)/python docs/pictures.py

picture: $(READY)
	@cd examples && FORCE_COLOR=1 TERM=xterm-256color COLUMNS=80 $(CURDIR)/$(BIN)/keepbusy run \
	  --clock modelled --values none gpt_item.py | $(CURDIR)/$(BIN)/python $(CURDIR)/docs/picture.py $(CURDIR)/docs/report.svg

# the page's program and styles, from page/ into the package; needs Node
page:
	@cd page && npm ci --silent && npm run --silent check && npm run --silent build

clean:
	rm -rf .venv .venv-* build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# PyTorch comes first and pinned: after other packages pip might take a build with gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	@$(if $(PYTHON),,echo "setting up: asking pip for which Python there is a build of $(TORCH)")
	@python=$(or $(PYTHON),$$(.ci/pythons "$(TORCH)")); \
	test -n "$$python" || { echo "keepbusy needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }; \
	echo "setting up: $$($$python --version) in $(VENV), once; all of it takes some three minutes"; \
	$$python -m venv $(VENV)
	@echo "setting up: PyTorch, 190 MB; some gigabytes where there is none but the build with CUDA"
	@$(call install,$(BIN)) "$(TORCH)"
	@echo "setting up: keepbusy and its tests and tools: 70 packages, 130 MB"
	@$(call install,$(BIN)) -c constraints.txt -e '.[torch,dev]'
	@touch $@

$(VENV)/.ready-pure: pyproject.toml constraints.txt
	@python=$(or $(PYTHON),$$(.ci/pythons | head -n 1)); \
	echo "setting up: $$($$python --version) in $(VENV), once; all of it takes about a minute"; \
	$$python -m venv $(VENV)
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@echo "setting up: keepbusy and its tests and tools: 60 packages, 130 MB"
	@$(call install,$(BIN)) -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@
