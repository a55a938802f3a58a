"""Builds torch_onnx_attn/_C.abi3.so: always the CPU kernels, and the CUDA kernels where nvcc is found.

The .cu files never see a torch header and the library never links libtorch_cuda, so nvcc alone decides whether CUDA is built: it
works under a CPU build of torch too. One binary serves every Python >= 3.10 and every torch >= 2.11, with or without CUDA.

Environment:
  TORCH_ONNX_ATTN_CUDA  auto (default) | 1 (fail without nvcc) | 0 (CPU only)
  CUDA_HOME             toolkit root (default: the one of nvcc on PATH, or /usr/local/cuda)
  TORCH_CUDA_ARCH_LIST  e.g. "8.0;9.0a": which of the architectures below to build (default: all)
  MAX_JOBS              parallel compiles (default: cores)
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent.resolve()

# Architectures of each .cu file: Hopper's own instructions need 90a; the rest is portable, with PTX for chips to come.
HOPPER = {"9.0a": "arch=compute_90a,code=sm_90a"}
PORTABLE = {
    "8.0": "arch=compute_80,code=sm_80",
    "9.0": "arch=compute_90,code=sm_90",
    "9.0+PTX": "arch=compute_90,code=compute_90",
}


def find_cuda_home() -> Path | None:
    """The CUDA toolkit to build with, or None for a CPU-only build."""
    wanted = os.environ.get("TORCH_ONNX_ATTN_CUDA", "auto")
    if wanted == "0":
        return None
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    candidates = [named] if named else ["/usr/local/cuda", nvcc and Path(nvcc).resolve().parent.parent]
    for candidate in candidates:
        if candidate and (Path(candidate) / "bin" / "nvcc").exists():
            return Path(candidate)
    if wanted == "1":
        sys.exit("TORCH_ONNX_ATTN_CUDA=1, but there is no nvcc: put it on PATH or set CUDA_HOME")
    return None


def architectures_of(source: Path) -> dict[str, str]:
    """Architecture name -> nvcc -gencode value for one .cu file, narrowed by TORCH_CUDA_ARCH_LIST."""
    known = HOPPER if "sm90" in source.stem else PORTABLE
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not wanted:
        return known
    if known is HOPPER:
        return HOPPER if {"9.0a", "9.0"} & set(wanted) else {}
    names = {name.replace("9.0a", "9.0") for name in wanted}
    return {name: value for name, value in PORTABLE.items() if name in names} or {"9.0+PTX": PORTABLE["9.0+PTX"]}


CUDA_HOME = find_cuda_home()
CCACHE = [path] if (path := shutil.which("ccache")) else []
CPP_SOURCES = sorted(
    str(path.relative_to(ROOT)) for folder in ("csrc", "csrc/cpu", "csrc/kernels") for path in (ROOT / folder).glob("*.cpp")
)
CUDA_SOURCES = sorted((ROOT / "csrc/kernels").glob("*.cu")) if CUDA_HOME else []
HEADERS = sorted(str(path.relative_to(ROOT)) for pattern in ("*.h", "*.inl") for path in (ROOT / "csrc").rglob(pattern))


class Build(BuildExtension):
    """BuildExtension plus an nvcc step with architectures of its own for each file, which CUDAExtension cannot express."""

    def build_extensions(self) -> None:
        if CUDA_HOME:
            objects = Path(self.build_temp).resolve() / "cuda"
            objects.mkdir(parents=True, exist_ok=True)
            jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
            print(f"compiling {len(CUDA_SOURCES)} CUDA files with {CUDA_HOME}/bin/nvcc, {jobs} at a time", flush=True)
            with ThreadPoolExecutor(jobs) as pool:
                compiled = list(pool.map(lambda source: self.compile_cuda(objects, source), CUDA_SOURCES))
            self.extensions[0].extra_objects = [str(path) for path in compiled if path]
        else:
            print("no CUDA kernels in this build: nvcc was not found or TORCH_ONNX_ATTN_CUDA=0", flush=True)
        super().build_extensions()

    def compile_cuda(self, objects: Path, source: Path) -> Path | None:
        gencode = [f"-gencode={value}" for value in architectures_of(source).values()]
        if not gencode:
            return None
        target, dependencies = objects / f"{source.stem}.o", objects / f"{source.stem}.d"
        command = [
            *CCACHE,
            f"{CUDA_HOME}/bin/nvcc",
            "-c",
            str(source),
            "-o",
            str(target),
            "-MD",
            "-MF",
            str(dependencies),
            "-O3",
            "-std=c++17",
        ]
        command += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v,--warn-on-spills", f"-I{ROOT / 'csrc'}", *gencode]
        record = target.with_suffix(".command")
        if self.is_current(target, dependencies, record, command):
            return target
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        log = target.with_suffix(".log")
        log.write_text(result.stdout)
        if result.returncode:
            sys.exit(f"nvcc failed on {source.name}:\n{result.stdout}")
        print(f"  {source.name} ({', '.join(architectures_of(source))})", flush=True)
        record.write_text(" ".join(command))
        return target

    @staticmethod
    def is_current(target: Path, dependencies: Path, record: Path, command: list[str]) -> bool:
        if not (target.exists() and dependencies.exists() and record.exists() and record.read_text() == " ".join(command)):
            return False
        read = dependencies.read_text().split(":", 1)[1].replace("\\\n", " ").split()
        return all(os.path.exists(path) and os.path.getmtime(path) <= target.stat().st_mtime for path in read)


# The stable ABI of torch 2.11: what it offers is what the op files may use, whatever torch compiles them.
definitions = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY", "-DPy_LIMITED_API=0x030A0000"]
# No path of the building machine in the binary, and no symbols but torch's registrations.
general = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", f"-ffile-prefix-map={ROOT}=.", "-Wall"]
# Float reductions may be reordered for the vector units, but inf and NaN keep their meaning: masks need them. -ffast-math at link
# time would also flush denormals in the whole process.
arithmetic = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
# Debian's linker drops libtorch.so, from which nothing is imported by name, and with it the weak CUDA symbol: name it again.
link = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL", "-Wl,-s"]
if CUDA_HOME:
    built = sorted({name.split("+")[0].rstrip("a").replace(".", "") for source in CUDA_SOURCES for name in architectures_of(source)})
    definitions += ["-DONNX_ATTN_WITH_CUDA", f"-DONNX_ATTN_CUDA_ARCHITECTURES={','.join(built)}"]
    if not any("sm90" in source.stem and architectures_of(source) for source in CUDA_SOURCES):
        definitions.append("-DONNX_ATTN_WITHOUT_SM90")
    library = CUDA_HOME / ("lib64" if (CUDA_HOME / "lib64").exists() else "lib")
    link += [f"-L{library}", "-l:libcudart_static.a", "-lrt", "-lpthread", "-ldl"]

setup(
    ext_modules=[
        CppExtension(
            "torch_onnx_attn._C",
            CPP_SOURCES,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": [*general, *arithmetic, *definitions]},
            extra_link_args=link,
            depends=HEADERS + [str(path) for path in CUDA_SOURCES],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=False)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
