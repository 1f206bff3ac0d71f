// A chain of kernel launches as data: a call checks its operands, allocates, fills argument structs and launches.
// Compiled for the host by kernels/cuda/chain.py, which describes chains and hands them to `build`; calls the driver's
// cuLaunchKernelEx through the address that it is given, and torch for memory. It needs no header of CUDA.
//
// Launching from Python took 27 us of an H100's host for a layer's experts (three kernels), this takes 13.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace {

constexpr int kMaxOperands = 32, kMaxArgumentBytes = 1024, kMapBytes = 128;
constexpr int kStreamOffset = 32;  // of hStream in CUlaunchConfig

// An owned reference to a Python object.
class Object {
 public:
  explicit Object(PyObject* owned = nullptr) : object_(owned) {}
  static Object borrowed(PyObject* object) { Py_XINCREF(object); return Object(object); }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept { std::swap(object_, other.object_); return *this; }
  ~Object() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// Other threads of Python run until the end of the scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// A keyword argument: a call that leaves it out means its default.
struct Option {
  Object name, value;
  bool is_default;
};

struct Operand {
  enum Kind { kTensor, kValue } kind;  // a value, such as None or a number, has to be equal
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  uint64_t alignment;
  Object value;
};

struct Result {
  int operand;  // the operand that is the result; -1 for a new tensor
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

// The source of an address in an argument struct; chain.py has the same numbers.
enum Source { kOperand, kResult, kScratch, kSemaphores };

struct Address {
  int source, index;
  int64_t offset;  // bytes
};

struct Patch {
  int place;  // bytes into the struct
  Address address;
};

// A tensor map of a matrix, which depends on its address: `encode(address, *numbers)` gives its bytes.
struct Map {
  int place;
  Address address;
  Object numbers;  // a tuple
};

struct Launch {
  void* function;
  std::vector<char> config, argument;
  std::vector<Patch> patches;
  std::vector<Map> maps;
  Object kernel;  // owns the function and what the config points to
};

struct Chain {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::vector<Operand> operands;
  std::vector<Option> options;
  std::vector<Result> results;
  std::vector<Launch> launches;
  std::vector<Object> semaphores;  // each () -> zeros for the current stream
  int64_t scratch;  // bytes
  at::Device device{at::kCPU};
  c10::DispatchKeySet keys;  // of dense tensors on the device
  // Functions of Python: the current stream of a device, what a thread calls first, a tensor map's bytes, an error.
  Object current_stream, bind_context, encode, raise_error, index;
  int (*launch)(const void* config, void* function, void** parameters, void** extra);
};

thread_local bool context_is_bound = false;

// The launcher of each device and stream. Looked up with the GIL; there are few streams, and threads may outlive statics.
auto& turns = *new std::map<std::pair<int, void*>, std::mutex>;

bool is_equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  return Py_TYPE(a) == Py_TYPE(b) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

// True if the operands are of the kind that the chain was built for; their addresses, 0 for values.
bool are_served(const Chain& chain, PyObject* const* arguments, size_t count, PyObject* names, uint64_t* addresses) {
  // Arguments that are left out at the end are None.
  for (size_t i = chain.operands.size(); i < count; ++i)
    if (arguments[i] != Py_None) return false;
  const Py_ssize_t given = names ? PyTuple_GET_SIZE(names) : 0;
  Py_ssize_t known = 0;
  for (const Option& option : chain.options) {
    Py_ssize_t place = 0;
    while (place < given && PyTuple_GET_ITEM(names, place) != option.name.get()) ++place;
    if (place == given)  // the dispatcher's names are other objects than those that are interned
      for (place = 0; place < given && !is_equal(PyTuple_GET_ITEM(names, place), option.name.get());) ++place;
    if (place == given ? !option.is_default : !is_equal(arguments[count + place], option.value.get())) return false;
    known += place < given;
  }
  if (known != given) return false;
  for (size_t i = 0; i < chain.operands.size(); ++i) {
    const Operand& wanted = chain.operands[i];
    addresses[i] = 0;
    if (wanted.kind == Operand::kValue) {
      if (!is_equal(i < count ? arguments[i] : Py_None, wanted.value.get())) return false;
      continue;
    }
    if (i >= count || !THPVariable_Check(arguments[i])) return false;
    const at::Tensor& tensor = THPVariable_Unpack(arguments[i]);
    // Any other key means a subclass, a transform, lazy negation or something else that is not plain memory on the device.
    const auto keys = tensor.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
    if (keys != chain.keys || tensor.scalar_type() != wanted.dtype || tensor.device() != chain.device ||
        tensor.sizes() != at::IntArrayRef(wanted.sizes))
      return false;
    // The stride of a dimension of one element says nothing: a contiguous tensor may have any.
    for (size_t d = 0; d < wanted.sizes.size(); ++d)
      if (wanted.sizes[d] != 1 && tensor.stride(d) != wanted.strides[d]) return false;
    addresses[i] = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    if (addresses[i] % wanted.alignment != 0) return false;
    if (!addresses[i] && tensor.numel()) return false;  // its memory was freed; kernels take 0 for "not given"
  }
  return true;
}

PyObject* run(Chain& chain, PyObject* const* arguments, size_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  uint64_t operands[kMaxOperands];
  if (!are_served(chain, arguments, count, names, operands)) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  const c10::DeviceGuard guard(chain.device);
  void* stream = nullptr;
  {
    if (!context_is_bound) {
      Object bound(PyObject_CallOneArg(chain.bind_context.get(), chain.index.get()));
      if (!bound.get()) return nullptr;
      context_is_bound = true;
    }
    Object address(PyObject_CallOneArg(chain.current_stream.get(), chain.index.get()));
    if (!address.get()) return nullptr;
    stream = PyLong_AsVoidPtr(address.get());
  }
  std::vector<Object> semaphores;
  semaphores.reserve(chain.semaphores.size());
  for (const Object& take : chain.semaphores) {
    semaphores.emplace_back(PyObject_CallNoArgs(take.get()));
    if (!semaphores.back().get()) return nullptr;
  }
  std::vector<at::Tensor> results(chain.results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const int operand = chain.results[i].operand;
    if (operand < 0) continue;
    results[i] = THPVariable_Unpack(arguments[operand]);
    // The operand will be written: copy memory that a lazy copy shares with another tensor, and tell autograd.
    operands[operand] = reinterpret_cast<uint64_t>(results[i].mutable_data_ptr());
    if (!results[i].is_inference()) results[i].unsafeGetTensorImpl()->bump_version();
  }
  at::Tensor scratch;
  {
    const WithoutGil allocation;  // may wait for the device
    for (size_t i = 0; i < results.size(); ++i) {
      const Result& result = chain.results[i];
      if (result.operand < 0)
        results[i] = at::empty_strided(
            result.sizes, result.strides, at::TensorOptions(chain.device).dtype(result.dtype));
    }
    if (chain.scratch)
      scratch = at::empty_strided({chain.scratch}, {1}, at::TensorOptions(chain.device).dtype(at::kByte));
  }
  const uint64_t scratch_address = chain.scratch ? reinterpret_cast<uint64_t>(scratch.data_ptr()) : 0;
  const auto resolved = [&](const Address& address) -> uint64_t {
    uint64_t base = 0;
    switch (address.source) {
      case kOperand: base = operands[address.index]; break;
      case kResult: base = reinterpret_cast<uint64_t>(results[address.index].data_ptr()); break;
      case kScratch: base = scratch_address; break;
      case kSemaphores:
        base = reinterpret_cast<uint64_t>(THPVariable_Unpack(semaphores[address.index].get()).data_ptr());
        break;
    }
    return base ? base + address.offset : 0;
  };
  std::vector<Object> maps;
  for (const Launch& launch : chain.launches) {
    for (const Map& map : launch.maps) {
      Object address(PyLong_FromUnsignedLongLong(resolved(map.address)));
      maps.emplace_back(PyObject_CallFunctionObjArgs(chain.encode.get(), address.get(), map.numbers.get(), nullptr));
      if (!maps.back().get()) return nullptr;
      if (!PyBytes_Check(maps.back().get()) || PyBytes_GET_SIZE(maps.back().get()) != kMapBytes)
        return PyErr_Format(PyExc_TypeError, "a tensor map of %d bytes was wanted", kMapBytes);
    }
  }
  int status = 0;
  {
    // A launch waits while the queue of its stream is full. Other threads run meanwhile, because they may have to launch
    // the work that the queue waits for, on another device. They launch nothing between a chain's launches on a stream.
    std::mutex& turn = turns[{chain.device.index(), stream}];
    const WithoutGil launching;
    const std::lock_guard<std::mutex> lock(turn);
    size_t next_map = 0;
    for (const Launch& launch : chain.launches) {
      alignas(64) char argument[kMaxArgumentBytes];
      std::memcpy(argument, launch.argument.data(), launch.argument.size());
      for (const Patch& patch : launch.patches) {
        const uint64_t address = resolved(patch.address);
        std::memcpy(argument + patch.place, &address, sizeof address);
      }
      for (const Map& map : launch.maps)
        std::memcpy(argument + map.place, PyBytes_AS_STRING(maps[next_map++].get()), kMapBytes);
      alignas(8) char config[64];
      std::memcpy(config, launch.config.data(), launch.config.size());
      std::memcpy(config + kStreamOffset, &stream, sizeof stream);
      void* parameters[] = {argument};
      status = chain.launch(config, launch.function, parameters, nullptr);
      if (status != 0) break;
    }
  }
  if (status != 0) {
    Object error(PyObject_CallFunction(chain.raise_error.get(), "i", status));
    return nullptr;
  }
  if (results.size() == 1) return THPVariable_Wrap(results[0]);
  Object tuple(PyTuple_New(results.size()));
  if (!tuple.get()) return nullptr;
  for (size_t i = 0; i < results.size(); ++i) {
    PyObject* wrapped = THPVariable_Wrap(results[i]);
    if (!wrapped) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), i, wrapped);
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  return run(*reinterpret_cast<Chain*>(self), arguments, PyVectorcall_NARGS(flags), names);
}

void destroy(PyObject* self) {
  auto* chain = reinterpret_cast<Chain*>(self);
  PyTypeObject* type = Py_TYPE(self);
  chain->operands.~vector();
  chain->options.~vector();
  chain->results.~vector();
  chain->launches.~vector();
  chain->semaphores.~vector();
  for (Object* object :
       {&chain->current_stream, &chain->bind_context, &chain->encode, &chain->raise_error, &chain->index})
    object->~Object();
  type->tp_free(self);
  Py_DECREF(type);
}

// ---- `build`: reads the description that chain.py makes

struct Failed {};  // a Python error is set

template <typename... Places>
void read(PyObject* tuple, const char* format, Places... places) {
  if (!PyArg_ParseTuple(tuple, format, places...)) throw Failed();
}

template <typename Function>
void for_each(PyObject* sequence, Function function) {
  const Py_ssize_t count = PySequence_Size(sequence);
  if (count < 0) throw Failed();
  for (Py_ssize_t i = 0; i < count; ++i) {
    Object item(PySequence_GetItem(sequence, i));
    if (!item.get()) throw Failed();
    function(item.get());
  }
}

std::vector<int64_t> integers(PyObject* sequence) {
  std::vector<int64_t> result;
  for_each(sequence, [&](PyObject* item) {
    result.push_back(PyLong_AsLongLong(item));
    if (PyErr_Occurred()) throw Failed();
  });
  return result;
}

at::ScalarType dtype_of(PyObject* dtype) {
  if (!THPDtype_Check(dtype)) { PyErr_SetString(PyExc_TypeError, "a dtype was wanted"); throw Failed(); }
  return reinterpret_cast<THPDtype*>(dtype)->scalar_type;
}

std::vector<char> bytes_of(const char* data, Py_ssize_t size, Py_ssize_t most) {
  if (size > most) { PyErr_Format(PyExc_ValueError, "got %zd bytes, wanted at most %zd", size, most); throw Failed(); }
  return {data, data + size};
}

Launch read_launch(PyObject* description) {
  Launch launch;
  unsigned long long function;
  const char *config, *argument;
  Py_ssize_t config_bytes, argument_bytes;
  PyObject *patches, *maps, *kernel;
  read(description, "Ky#y#OOO", &function, &config, &config_bytes, &argument, &argument_bytes, &patches, &maps, &kernel);
  launch.function = reinterpret_cast<void*>(function);
  launch.config = bytes_of(config, config_bytes, 64);
  launch.argument = bytes_of(argument, argument_bytes, kMaxArgumentBytes);
  launch.kernel = Object::borrowed(kernel);
  for_each(patches, [&](PyObject* item) {
    Patch patch;
    long long offset;
    read(item, "i(iiL)", &patch.place, &patch.address.source, &patch.address.index, &offset);
    patch.address.offset = offset;
    launch.patches.push_back(patch);
  });
  for_each(maps, [&](PyObject* item) {
    Map map;
    long long offset;
    PyObject* numbers;
    read(item, "i(iiL)O", &map.place, &map.address.source, &map.address.index, &offset, &numbers);
    map.address.offset = offset;
    map.numbers = Object::borrowed(numbers);
    launch.maps.push_back(std::move(map));
  });
  return launch;
}

PyTypeObject* chain_type = nullptr;

PyObject* build(PyObject*, PyObject* description) {
  PyObject *operands, *options, *results, *launches, *semaphores, *functions;
  long long scratch;
  int index, is_cuda;
  unsigned long long launch_address;
  if (!PyArg_ParseTuple(description, "OOOOOLipOK", &operands, &options, &results, &launches, &semaphores, &scratch,
                        &index, &is_cuda, &functions, &launch_address))
    return nullptr;
  auto* chain = reinterpret_cast<Chain*>(chain_type->tp_alloc(chain_type, 0));
  if (!chain) return nullptr;
  new (&chain->operands) std::vector<Operand>();
  new (&chain->options) std::vector<Option>();
  new (&chain->results) std::vector<Result>();
  new (&chain->launches) std::vector<Launch>();
  new (&chain->semaphores) std::vector<Object>();
  for (Object* object :
       {&chain->current_stream, &chain->bind_context, &chain->encode, &chain->raise_error, &chain->index})
    new (object) Object();
  Object self(reinterpret_cast<PyObject*>(chain));
  chain->vectorcall = call;
  chain->scratch = scratch;
  chain->device = is_cuda ? at::Device(at::kCUDA, index) : at::Device(at::kCPU);
  chain->keys = c10::DispatchKeySet(is_cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  chain->launch = reinterpret_cast<decltype(chain->launch)>(launch_address);
  try {
    PyObject *stream, *bind, *encode, *raise, *index_object;
    read(functions, "OOOOO", &stream, &bind, &encode, &raise, &index_object);
    chain->current_stream = Object::borrowed(stream);
    chain->bind_context = Object::borrowed(bind);
    chain->encode = Object::borrowed(encode);
    chain->raise_error = Object::borrowed(raise);
    chain->index = Object::borrowed(index_object);
    for_each(operands, [&](PyObject* item) {
      PyObject *dtype, *sizes, *strides, *value;
      int alignment;
      read(item, "OOOiO", &dtype, &sizes, &strides, &alignment, &value);
      Operand operand{dtype == Py_None ? Operand::kValue : Operand::kTensor, at::kByte, {}, {}, uint64_t(alignment),
                      Object::borrowed(value)};
      if (operand.kind == Operand::kTensor) {
        operand.dtype = dtype_of(dtype);
        operand.sizes = integers(sizes);
        operand.strides = integers(strides);
      }
      chain->operands.push_back(std::move(operand));
    });
    if (chain->operands.size() > kMaxOperands) {
      PyErr_Format(PyExc_ValueError, "got %zu operands, wanted at most %d", chain->operands.size(), kMaxOperands);
      throw Failed();
    }
    for_each(options, [&](PyObject* item) {
      PyObject *name, *value;
      int is_default;
      read(item, "OOp", &name, &value, &is_default);
      chain->options.push_back({Object::borrowed(name), Object::borrowed(value), is_default != 0});
    });
    for_each(results, [&](PyObject* item) {
      Result result;
      PyObject *dtype, *sizes, *strides;
      read(item, "iOOO", &result.operand, &dtype, &sizes, &strides);
      result.dtype = dtype_of(dtype);
      result.sizes = integers(sizes);
      result.strides = integers(strides);
      chain->results.push_back(std::move(result));
    });
    for_each(launches, [&](PyObject* item) { chain->launches.push_back(read_launch(item)); });
    for_each(semaphores, [&](PyObject* item) { chain->semaphores.push_back(Object::borrowed(item)); });
  } catch (const Failed&) {
    return nullptr;
  }
  return self.release();
}

PyMethodDef methods[] = {{"build", build, METH_VARARGS, "Build a chain from its description."}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "thunder_moe_chain", "Chains of kernel launches.", -1, methods};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Chain, vectorcall), READONLY, nullptr}, {}};
PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_members, members},
    {}};
PyType_Spec spec = {
    "thunder_moe_chain.Chain", sizeof(Chain), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

PyMODINIT_FUNC PyInit_thunder_moe_chain() {
  Object made(PyModule_Create(&module));
  if (!made.get()) return nullptr;
  chain_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return chain_type ? made.release() : nullptr;
}
