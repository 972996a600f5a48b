# SPDX-License-Identifier: Apache-2.0
"""torch.compile on the software GPU: Inductor's C++ kernels as modules that the server runs.

Inductor would make kernels of Triton for a CUDA graph. Here the graph is handed to it as a graph of the CPU: every device in
it is put to 'cpu', its fake tensors are made anew, and Inductor's own CPU backend makes the code. Then the code is told where
it runs: its buffers are the GPU's, its kernels are compiled into modules of the software GPU (devproxy_soft_module.h), and
each call launches one on the current stream. So the kernels are, byte for byte, those of a compiled CPU model of one thread.

Which graph is not taken: one with tensors of two GPUs, with random numbers of the CPU's generator, or with graphs inside
(flex_attention, cond). Such a graph runs eager, and so does one that Inductor cannot compile, for whatever reason.
"""

from __future__ import annotations

# Late imports: this is loaded behind torch._inductor.compile_fx, and what is imported here may import that in turn.
import copy
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from devproxy_torch.plugin import bindings

# What a module says of itself: the part of devproxy_soft_module.h that these modules need, which a job's machine may not
# have. A test compares the two.
MODULE_ABI = """
extern "C" {
typedef struct devproxy_soft_launch {
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  uint32_t device;
  uint64_t stream;
  const uint8_t* params;
  uint64_t params_bytes;
  const void* services;
  void* function_cookie;
  char* error;
  uint64_t error_bytes;
  void* state;
} devproxy_soft_launch;
typedef int (*devproxy_soft_kernel)(const devproxy_soft_launch* launch);
typedef struct devproxy_soft_function {
  devproxy_soft_kernel kernel;
  void* cookie;
  uint32_t max_threads;
  uint32_t shared_bytes;
  uint32_t n_params;
  struct {
    uint32_t offset, size;
  } params[64];
} devproxy_soft_function;
typedef struct devproxy_soft_module_table {
  uint32_t abi;
  uint32_t n_globals;
  const void* globals;
  int (*get_function)(const char* name, devproxy_soft_function* out);
  int (*load)(uint32_t device, char* error, uint64_t error_bytes);
} devproxy_soft_module_table;
typedef struct devproxy_soft_stretch {
  uint32_t place;
  uint32_t writes;
} devproxy_soft_stretch;
typedef struct devproxy_soft_footprint {
  const char* name;
  uint32_t n_stretches;
  uint32_t repeatable;
  const devproxy_soft_stretch* stretches;
} devproxy_soft_footprint;
}
"""
# All of a kernel's arguments are one parameter: eight bytes for each. Behind them, for each tensor, where its storage begins
# and its bytes: what the kernel can reach; its argument is then the offset in the storage, the same at ranks that do the
# same. A failed check of an index throws; on a GPU that is a device-side assertion.
MODULE = """
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
%(abi)s
namespace {
int devproxy_launch(const devproxy_soft_launch* launch) {
  const auto word = [launch](unsigned i) {
    uint64_t value;
    std::memcpy(&value, launch->params + %(word)d * i, sizeof value);
    return value;
  };
  (void)word;
  try {
    kernel(%(arguments)s);
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(launch->error, launch->error_bytes, "%%s", error.what());
  } catch (...) {
    std::snprintf(launch->error, launch->error_bytes, "an exception");
  }
  return 710;
}
int devproxy_get_function(const char* name, devproxy_soft_function* out) {
  if (std::strcmp(name, "%(name)s") != 0) return 500;
  out->kernel = devproxy_launch;
  out->n_params = 1;
  out->params[0].offset = 0;
  out->params[0].size = %(bytes)d;
  return 0;
}
}  // namespace
extern "C" {
extern __attribute__((visibility("default"))) const devproxy_soft_module_table devproxy_soft_module;
const devproxy_soft_module_table devproxy_soft_module = {1, 0, nullptr, devproxy_get_function, nullptr};
extern __attribute__((visibility("default"))) const char* const devproxy_soft_function_names[];
const char* const devproxy_soft_function_names[] = {"%(name)s", nullptr};
}
"""
FOOTPRINTS = """
extern "C" {
static const devproxy_soft_stretch devproxy_stretches[] = {%(stretches)s};
extern __attribute__((visibility("default"))) const devproxy_soft_footprint devproxy_soft_footprints[];
const devproxy_soft_footprint devproxy_soft_footprints[] = {{"%(name)s", %(pointers)d, 1, devproxy_stretches},
                                                            {nullptr, 0, 0, nullptr}};
}
"""
# Divisions of integers, in front of a kernel that has some: as eager ops do them in the server (executor/other_types.cc),
# also by zero, which CUDA leaves open and the CPU answers with SIGFPE or an exception. Of numbers or of vectors of them.
DIVISIONS = """
#include <type_traits>
namespace {
template <typename A, typename B, typename Of>
inline auto devproxy_each(const A& a, const B& b, Of of) {
  if constexpr (std::is_arithmetic_v<A>) {
    using C = std::common_type_t<A, B>;
    return of(static_cast<C>(a), static_cast<C>(b));
  } else {
    static_assert(std::is_same_v<A, B>);
    alignas(64) typename A::value_type x[A::size()], y[A::size()];
    a.store(x);
    b.store(y);
    for (int i = 0; i < static_cast<int>(A::size()); ++i) x[i] = of(x[i], y[i]);
    return A::loadu(x);
  }
}
// The least number divided by -1 is no number of its type: it stays what it is, and nothing is left over.
template <typename C>
inline bool devproxy_negates(C b) {
  return std::is_signed_v<C> && b == static_cast<C>(-1);
}
template <typename C>
inline bool devproxy_differs(C a, C b) {
  if constexpr (std::is_signed_v<C>) return (a < 0) != (b < 0);
  return false;
}
template <typename C>
inline C devproxy_quotient(C a, C b) {
  if (b == 0) return static_cast<C>(-1);
  if (devproxy_negates(b)) return static_cast<C>(0 - static_cast<std::make_unsigned_t<C>>(a));
  return static_cast<C>(a / b);
}
template <typename C>
inline C devproxy_rest(C a, C b) {
  if (b == 0) return sizeof(C) == 8 && a >= 0 ? static_cast<C>(0xFFFFFFFF) : static_cast<C>(-1);
  return devproxy_negates(b) ? C(0) : static_cast<C>(a % b);
}
template <typename A, typename B>
inline auto devproxy_truncdiv(const A& a, const B& b) {
  return devproxy_each(a, b, [](auto x, auto y) { return devproxy_quotient(x, y); });
}
template <typename A, typename B>
inline auto devproxy_floordiv(const A& a, const B& b) {
  return devproxy_each(a, b, [](auto x, auto y) {
    const bool rounds = y != 0 && devproxy_differs(x, y) && devproxy_rest(x, y) != 0;
    return static_cast<decltype(x)>(devproxy_quotient(x, y) - rounds);
  });
}
template <typename A, typename B>
inline auto devproxy_mod(const A& a, const B& b) {
  return devproxy_each(a, b, [](auto x, auto y) { return devproxy_rest(x, y); });
}
template <typename A, typename B>
inline auto devproxy_remainder(const A& a, const B& b) {
  return devproxy_each(a, b, [](auto x, auto y) {
    const auto rest = devproxy_rest(x, y);
    return static_cast<decltype(x)>(rest != 0 && y != 0 && devproxy_differs(rest, y) ? rest + y : rest);
  });
}
}  // namespace
"""
WORD = 8  # bytes of an argument
BLOCK_LIMIT = 4096  # bytes of a launch's parameters, cuda.h before 12.1
# Inductor's own settings for such a graph, whatever the script has set: the wrapper is Python, whose text we know; the server
# runs a kernel with one thread; what is kept on disk for a graph of the CPU is not for us.
SETTINGS = {
    "cpp.threads": 1,
    "cpp_wrapper": False,
    "freezing": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
}

_running = (
    threading.local()
)  # .plan: of the graph that this thread makes code for, where that is for the software GPU


class NotTaken(Exception):
    """This graph is not handed to Inductor; the text says why."""


def module_text(name: str, types: Sequence[str], source: str) -> str:
    """The C++ of a module with one kernel. types: of its arguments, as Inductor writes them: pointers and integers."""
    pointers = told_pointers(types)
    arguments: list[str] = []
    stretches: list[str] = []
    for i, kind in enumerate(types):
        if not kind.endswith("*"):
            arguments.append(f"static_cast<{kind}>(word({i}))")
        elif not pointers:
            arguments.append(f"reinterpret_cast<{kind}>(word({i}))")
        else:
            begin = len(types) + 2 * len(stretches)
            arguments.append(f"reinterpret_cast<{kind}>(word({begin}) + word({i}))")
            # Inductor passes what a kernel only reads as const. One buffer may come as both; then it is written.
            writes = int(not kind.startswith("const "))
            stretches.append(f"{{{WORD * begin}, {writes}}}")
    filled = {
        "abi": MODULE_ABI,
        "name": name,
        "word": WORD,
        "arguments": ", ".join(arguments),
        "bytes": WORD * (len(types) + 2 * len(pointers)),
        "pointers": len(pointers),
        "stretches": ", ".join(stretches),
    }
    divisions = (
        DIVISIONS if re.search(r"\bdevproxy_(truncdiv|floordiv|mod|remainder)\(", source) else ""
    )
    return divisions + source + MODULE % filled + (FOOTPRINTS % filled if pointers else "")


def told_pointers(types: Sequence[str]) -> list[str]:
    """The arguments of which a launch says how far they reach: all tensors, or none where its parameters have no room. A
    kernel that says nothing counts as one that may touch anything."""
    pointers = [kind for kind in types if kind.endswith("*")]
    has_room = WORD * (len(types) + 2 * len(pointers)) <= BLOCK_LIMIT
    return pointers if has_room else []


class _Kernel:
    """Called as Inductor's code calls a C++ kernel: with tensors and integers."""

    def __init__(self, name: str, types: Sequence[str], image: bytes) -> None:
        self._name, self._image = name.encode(), image
        self._tells = bool(told_pointers(types))
        self._launch = bindings().launch_words
        self._functions: dict[int, int] = {}  # by the GPU's index

    def __call__(self, *given: Any) -> None:
        index = torch._C._cuda_getDevice()
        function = self._functions.get(index)
        if function is None:
            function = self._functions[index] = self._load()
        self._launch(function, given, self._tells)

    def _load(self) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), self._image))
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, self._name))
        assert function.value
        return function.value


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        raise RuntimeError(
            f"CUDA error: {(name.value or b'').decode()} in a kernel of torch.compile"
        )


@functools.cache
def _module_cache() -> Any:
    """Inductor's own way from text to shared object, with its flags, files and locks; only that nothing is loaded here."""
    from torch._inductor.codecache import CppCodeCache

    class ModuleCache(CppCodeCache):  # type: ignore[misc]
        cache: dict[str, Any] = {}
        cache_clear = staticmethod(cache.clear)
        cpp_compile_command_flags = {"include_pytorch": False, "shared": True}

        class _Path(str):
            key: str  # it is given one

        @staticmethod
        def _load_library_inner(path: str, key: str) -> Any:
            return ModuleCache._Path(path)

    return ModuleCache


@functools.cache
def _compilers() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    from torch._inductor import config

    return ThreadPoolExecutor(max(1, config.compile_threads or 1), "devproxy-inductor")


def _module(_: object, name: str, types: Sequence[str], source: str) -> Any:
    """A method of AsyncCompile: starts the compiler, which is waited for with all others."""
    from torch._inductor import config
    from torch._inductor.codecache import LambdaFuture

    if WORD * len(types) > BLOCK_LIMIT:
        raise NotTaken(f"a kernel has {len(types)} arguments")
    for kind in types:
        if not re.fullmatch(r"(const )?(\w+(::\w+)*\*|int64_t)", kind):
            raise NotTaken(f"a kernel takes a {kind}")
    made = _module_cache().load_async(
        module_text(name, types, source), submit_fn=_compilers().submit
    )

    def kernel() -> _Kernel:
        with open(made(), "rb") as file:
            return _Kernel(name, types, file.read())

    # With one thread (a machine of one core, TORCHINDUCTOR_COMPILE_THREADS=1) AsyncCompile.wait() asks no future.
    return LambdaFuture(kernel) if (config.compile_threads or 1) > 1 else kernel()


def _for_gpu(text: str, index: int) -> str:
    """Inductor's Python for a graph of the CPU, told where it runs."""
    text, aliases = re.subn(r"(\._empty_strided_)cpu\n", r"\1cuda\n", text)
    if aliases != 1:
        raise NotTaken("this version of Inductor makes its buffers in another way")
    text = text.replace("device(type='cpu')", f"device(type='cuda', index={index})")
    return re.sub(r"^(\w+) = async_compile\.cpp_pybinding\(", r"\1 = async_compile.devproxy_module('\1', ", text, flags=re.M)  # fmt: skip


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _is_on_gpu(gm: Any, inputs: Sequence[object]) -> bool:
    made = (node.meta.get("val") for node in gm.graph.nodes)
    return any(one.is_cuda for value in (*inputs, *made) for one in _tensors(value))


class _Plan:
    """A graph of one GPU as a graph of the CPU, and what is to be done around a call of its code."""

    def __init__(self, gm: Any, inputs: Sequence[Any]) -> None:
        self._gm = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        self._gm.meta.update(gm.meta)
        self.index = self._only_gpu(inputs)
        self.inputs_of_host = {i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor) and not one.is_cuda}  # fmt: skip
        self.written: set[int] = set()  # of those
        self.outputs_of_host: set[int] = set()
        self._look()

    def _only_gpu(self, inputs: Sequence[Any]) -> int:
        made = [node.meta.get("val") for node in self._gm.graph.nodes]
        found = {one.device.index for one in _tensors([*inputs, *made]) if one.is_cuda}
        if len(found) != 1:
            raise NotTaken("it has tensors of several GPUs")
        (index,) = found
        return int(index or 0)

    def _look(self) -> None:
        """Refuses what would be another computation on the CPU, and sees what belongs to the host."""
        places = [node for node in self._gm.graph.nodes if node.op == "placeholder"]
        for node in self._gm.graph.nodes:
            value = node.meta.get("val")
            if node.op == "get_attr" and not isinstance(
                getattr(self._gm, node.target, None), torch.Tensor
            ):
                raise NotTaken("it has a graph inside")
            if node.op == "output":
                (returned,) = node.args
                self.outputs_of_host = {i for i, one in enumerate(returned) if self._is_of_host(one)}  # fmt: skip
            if node.op != "call_function":
                continue
            of_host = any(not one.is_cuda for one in _tensors(value))
            tags = getattr(node.target, "tags", ())
            if of_host and (torch.Tag.nondeterministic_seeded in tags or "inductor_seed" in str(node.target)):  # fmt: skip
                raise NotTaken("it draws random numbers of the CPU")
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            for number, argument in enumerate(node.args):
                if argument not in places or places.index(argument) not in self.inputs_of_host:
                    continue
                if node.target is not torch.ops.aten.copy_.default:
                    raise NotTaken("it writes tensors of the CPU")
                if number == 0:
                    self.written.add(places.index(argument))

    @staticmethod
    def _is_of_host(node: object) -> bool:
        return isinstance(node, torch.fx.Node) and any(
            not one.is_cuda for one in _tensors(node.meta.get("val"))
        )

    def for_cpu(self, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The graph and its example inputs, as they would be on the CPU."""
        from torch._guards import detect_fake_mode
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        def put(value: object) -> object:
            is_gpu = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_gpu else value

        for node in self._gm.graph.nodes:
            node.args, node.kwargs = torch.utils._pytree.tree_map(put, (node.args, node.kwargs))
            if node.op == "get_attr":
                setattr(self._gm, node.target, getattr(self._gm, node.target).cpu())
        mode = detect_fake_mode(inputs)
        if mode is None:
            raise NotTaken("its inputs are no fake tensors")
        with mode:
            on_cpu = [
                torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="cpu")
                if isinstance(one, torch.Tensor)
                else one
                for one in inputs
            ]
        self._gm.recompile()
        FakeTensorProp(self._gm, mode=mode).propagate_dont_convert_inputs(*on_cpu)
        return self._gm, on_cpu

    def around(self, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A call of the code: its arguments are a list that it may empty."""
        gpu = torch.device("cuda", self.index)

        def run(args: list[Any]) -> Any:
            back = []
            for place in self.inputs_of_host:
                of_host = args[place]
                args[place] = of_host.to(gpu)
                if place in self.written:
                    back.append((of_host, args[place]))
            with torch.cuda._DeviceGuard(self.index):
                found = call(args)
            for of_host, written in back:
                of_host.copy_(written)
            if self.outputs_of_host:
                found = [one.cpu() if i in self.outputs_of_host else one for i, one in enumerate(found)]  # fmt: skip
            return found

        return run


def _complete_codegen() -> None:
    """Once: Inductor's own steps, with an eye on whether this thread compiles for the software GPU."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering

    if hasattr(AsyncCompile, "devproxy_module"):
        return
    graphs: Any = GraphLowering
    files: Any = PyCodeCache
    plain_codegen, plain_load = graphs.codegen, files.load_by_key_path

    def codegen(self: Any) -> Any:
        found = plain_codegen(self)
        plan = getattr(_running, "plan", None)
        if plan is not None:
            found[0].value = _for_gpu(found[0].value, plan.index)
        return found

    def load(*given: Any, **named: Any) -> Any:
        """attrs: the graph's constants, which the code passes to kernels."""
        plan = getattr(_running, "plan", None)
        if plan is not None and named.get("attrs"):
            gpu = torch.device("cuda", plan.index)
            named["attrs"] = {
                k: v.to(gpu) if isinstance(v, torch.Tensor) else v
                for k, v in named["attrs"].items()
            }
        return plain_load(*given, **named)

    graphs.codegen = codegen
    files.load_by_key_path = staticmethod(load)
    AsyncCompile.devproxy_module = _module
    _complete_divisions()


def _complete_divisions() -> None:
    """DIVISIONS instead of the operators of C++, which a zero among integers ends. Both classes: numbers and vectors."""
    from torch._inductor.codegen import cpp

    def integers(*given: Any) -> bool:
        types = [getattr(one, "dtype", None) for one in given]
        return all(
            isinstance(kind, torch.dtype)
            and kind is not torch.bool
            and not (kind.is_floating_point or kind.is_complex)
            for kind in types
        )

    def complete(cls: Any, name: str) -> None:
        plain = vars(cls)[name].__func__

        @functools.wraps(plain)
        def division(a: Any, b: Any) -> Any:
            if getattr(_running, "plan", None) is None or not integers(a, b):
                return plain(a, b)
            return f"devproxy_{name}({a}, {b})"

        setattr(cls, name, staticmethod(division))

    for cls in (cpp.CppOverrides, cpp.CppVecOverrides):
        for name in ("truncdiv", "floordiv", "mod", "remainder"):
            if isinstance(vars(cls).get(name), staticmethod):
                complete(cls, name)


def _compile_inner(plain: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Any]:
    """compile_fx_inner for graphs of the software GPU: forward, backward and inference ones pass here."""

    @functools.wraps(plain)
    def compile_inner(gm: Any, inputs: Sequence[Any], *given: Any, **named: Any) -> Any:
        if not _is_on_gpu(gm, inputs):
            return plain(gm, inputs, *given, **named)
        from torch._inductor import config

        named["cpp_wrapper"] = False
        if named.get("cudagraphs") is not None:
            named["cudagraphs"] = type(named["cudagraphs"])(False)
        try:
            plan = _Plan(gm, inputs)
            on_cpu, their_inputs = plan.for_cpu(inputs)
            _running.plan = plan
            with config.patch(SETTINGS):
                made = plain(on_cpu, their_inputs, *given, **named)
            made.current_callable = plan.around(made.current_callable)
        except Exception as error:
            # The forward graph was compiled already. Random numbers are drawn anew from the forward's seeds there, which only
            # Inductor's code does.
            drawn = any("inductor_random" in str(node.target) for node in gm.graph.nodes)
            if not named.get("is_backward"):
                raise
            if drawn:
                raise RuntimeError(
                    f"{_runs_eager('a backward graph', error, 'cannot run')}; the forward graph ran, and its random numbers "
                    "cannot be drawn again otherwise. Set torch._inductor.config.fallback_random = True, or compile with "
                    "backend='eager'"
                ) from error
            say(_runs_eager("a backward graph", error))
            from torch._functorch._aot_autograd.utils import make_boxed_func

            return make_boxed_func(gm.forward)
        finally:
            _running.plan = None
        return made

    return compile_inner


def _runs_eager(what: str, error: Exception, runs: str = "runs eager") -> str:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    if not isinstance(error, NotTaken):
        reason = f"Inductor's CPU backend failed: {reason}"
    return f"torch.compile: {what} of the software GPU {runs}: {reason}"


def complete(module: Any, say: Callable[[str], None]) -> None:
    """After torch._inductor.compile_fx was imported. say: prints a line, each one once."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    plain = module.compile_fx
    inner = _compile_inner(module.compile_fx_inner, say)

    def on_gpu(value: object) -> bool:
        return any(one.is_cuda for one in _tensors(value))

    def is_for_gpu(graph: Any, inputs: Sequence[object]) -> bool:
        held = [*graph.parameters(), *graph.buffers()]
        made = [node.meta.get("example_value") for node in graph.graph.nodes]
        return on_gpu([*inputs, *held, *made])

    @functools.wraps(plain)
    def compile_fx(model: Any, inputs: Sequence[object], *given: Any, **named: Any) -> Any:
        whole = not given and "inner_compile" not in named
        if (
            not whole
            or not isinstance(model, torch.fx.GraphModule)
            or not is_for_gpu(model, inputs)
        ):
            return plain(model, inputs, *given, **named)
        _complete_codegen()
        # Its cache would hand the code of such a graph to another process, without what is around a call.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            try:
                return plain(model, inputs, inner_compile=inner, **named)
            except (RestartAnalysis, SkipFrame):  # no failures: a word to Dynamo
                raise
            except Exception as error:
                say(_runs_eager("a graph", error))
                return model.forward

    module.compile_fx = compile_fx
