#include "simulator/simulator.h"

#include <algorithm>
#include <stdexcept>

#include "simulator/state.h"

namespace pygraph::simulator {
namespace {

State* g_state = nullptr;

// Every call passes here: counted, failed on demand, serialised.
abi::Result enter(const char* symbol) {
  ++g_state->calls[symbol];
  const auto failure = g_state->failures.find(symbol);
  if (failure == g_state->failures.end() || --failure->second.first > 0) return abi::kSuccess;
  const abi::Result code = failure->second.second;
  g_state->failures.erase(failure);
  return code;
}

template <size_t N>
struct Text {
  constexpr Text(const char (&text)[N]) { std::copy_n(text, N, value); }  // NOLINT
  char value[N]{};
};

template <Text Symbol, auto Implementation>
struct Entry;
template <Text Symbol, typename... Args, abi::Result (*Implementation)(Args...)>
struct Entry<Symbol, Implementation> {
  static abi::Result call(Args... args) {
    if (g_state == nullptr) return abi::kDeinitialized;
    const std::lock_guard lock(g_state->mutex);
    const abi::Result injected = enter(Symbol.value);
    return injected != abi::kSuccess ? injected : Implementation(args...);
  }
};

Driver make_table() {
  Driver driver;
#define PYGRAPH_ENTRY(member, symbol, version, ...) \
  driver.member = &Entry<Text(symbol), &functions::member>::call;
  PYGRAPH_DRIVER_FUNCTIONS(PYGRAPH_ENTRY)
#undef PYGRAPH_ENTRY
  return driver;
}

}  // namespace

State* current_state() {
  return g_state;
}

Simulator::Simulator() {
  if (g_state != nullptr) throw std::logic_error("one Simulator at a time");
  g_state = new State;
}

Simulator::~Simulator() {
  delete g_state;
  g_state = nullptr;
}

const Driver& Simulator::driver() const {
  static const Driver table = make_table();
  return table;
}

void Simulator::add_kernel(Kernel kernel) {
  auto function = std::make_unique<Function>();
  for (const size_t size : kernel.param_sizes) {
    const size_t alignment = std::min<size_t>(size, 8);
    const size_t offset = (function->image_size + alignment - 1) / alignment * alignment;
    function->layout.emplace_back(offset, size);
    function->image_size = offset + size;
  }
  const std::string name = kernel.name;
  function->kernel = std::move(kernel);
  g_state->functions[name] = std::move(function);
}

void Simulator::fail(const std::string& symbol, int nth, abi::Result code) {
  g_state->failures[symbol] = {nth, code};
}

void Simulator::forget_failures() {
  g_state->failures.clear();
}

int Simulator::calls(const std::string& symbol) const {
  return g_state->calls[symbol];
}

void Simulator::shuffle(unsigned seed) {
  g_state->order.emplace(seed);
}

void Simulator::capture_child(CUstream stream, CUgraph graph) {
  auto node = std::make_unique<SimulatedNode>();
  node->type = abi::kNodeGraph;
  node->child = copy_graph(*as_graph(graph));
  enqueue(stream, std::move(node));
}

void Simulator::hold(CUstream stream, bool is_held) {
  reinterpret_cast<SimulatedStream*>(stream)->is_held = is_held;
}

uint64_t Simulator::last_executable_flags() const {
  return g_state->last_executable_flags;
}

size_t Simulator::live_objects() const {
  return g_state->streams.size() + g_state->objects.size() + g_state->memory.size() +
         g_state->reserved.size() + g_state->pages.size();
}

}  // namespace pygraph::simulator
