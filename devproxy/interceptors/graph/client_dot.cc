// SPDX-License-Identifier: Apache-2.0
// A graph as Graphviz draws it: cuGraphDebugDotPrint.
#include <stdio.h>

#include "devproxy/interceptors/graph/client_graph.h"

namespace devproxy::sa::graph {

using client::place_of;

namespace {

const char* type_name(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return "KERNEL";
    case CU_GRAPH_NODE_TYPE_MEMCPY: return "MEMCPY";
    case CU_GRAPH_NODE_TYPE_MEMSET: return "MEMSET";
    case CU_GRAPH_NODE_TYPE_HOST: return "HOST";
    case CU_GRAPH_NODE_TYPE_GRAPH: return "GRAPH";
    case CU_GRAPH_NODE_TYPE_EMPTY: return "EMPTY";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return "EVENT_WAIT";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return "EVENT_RECORD";
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return "MEM_ALLOC";
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return "MEM_FREE";
    default: return "?";
  }
}

const char* direction(const CUDA_MEMCPY3D& p) {
  Side dst, src;
  if (!sides(p, &dst, &src)) return "?";
  auto host = [](uint64_t addr) { return place_of(addr).device < 0 || place_of(addr).pinned; };
  return host(src.addr) ? (host(dst.addr) ? "HtoH" : "HtoD") : host(dst.addr) ? "DtoH" : "DtoD";
}

void print_dot(FILE* out, const Graph& g, bool verbose, int* clusters) {
  auto id = [](const Node* n) { return static_cast<unsigned long long>(n->handle); };
  fprintf(out, "subgraph cluster_%d {\nlabel=\"graph_%llu\";\n", (*clusters)++,
          static_cast<unsigned long long>(g.handle >> 4 & 0xffffffff));
  for (size_t i = 0; i < g.nodes.size(); ++i) {
    const Node* n = g.nodes[i].get();
    fprintf(out, "\"n%llx\" [shape=box label=\"%zu\\n%s", id(n), i, type_name(n->type));
    switch (n->type) {
      case CU_GRAPH_NODE_TYPE_KERNEL: {
        const module::FunctionObj* f = module::functions().get(n->kernel.function);
        fprintf(out, "\\n%s", f ? f->name.c_str() : "(unloaded)");
        const launch::Geometry& at = n->kernel.geometry;
        if (verbose)
          fprintf(out, "\\n<<<(%u,%u,%u),(%u,%u,%u),%u>>>\\n%zu bytes of parameters", at.grid[0], at.grid[1],
                  at.grid[2], at.block[0], at.block[1], at.block[2], at.shared, n->kernel.block.size());
        break;
      }
      case CU_GRAPH_NODE_TYPE_MEMCPY:
        fprintf(out, "\\n%s", direction(n->copy));
        if (verbose) fprintf(out, "\\n%zu x %zu x %zu", n->copy.WidthInBytes, n->copy.Height, n->copy.Depth);
        break;
      case CU_GRAPH_NODE_TYPE_MEMSET:
        if (verbose)
          fprintf(out, "\\n0x%llx = 0x%x\\n%zu x %zu of %u bytes", static_cast<unsigned long long>(n->set.dst),
                  n->set.value, n->set.width, n->set.height, n->set.elementSize);
        break;
      case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        if (verbose)
          fprintf(out, "\\n0x%llx\\n%zu bytes", static_cast<unsigned long long>(n->memory->addr),
                  n->memory->given.bytesize);
        break;
      case CU_GRAPH_NODE_TYPE_MEM_FREE:
        if (verbose) fprintf(out, "\\n0x%llx", static_cast<unsigned long long>(n->freed_addr));
        break;
      default: break;
    }
    fprintf(out, "\"];\n");
    if (n->child) print_dot(out, *n->child, verbose, clusters);
  }
  for (const auto& n : g.nodes)
    for (const Edge& e : n->dependencies) fprintf(out, "\"n%llx\" -> \"n%llx\";\n", id(e.node), id(n.get()));
  fprintf(out, "}\n");
}

}  // namespace

CUresult cuGraphDebugDotPrint(CUgraph hGraph, const char* path, unsigned int flags) {
  std::lock_guard lock(mu());
  const Graph* g = graph_of(hGraph);
  if (!g) return CUDA_ERROR_INVALID_VALUE;
  FILE* out = fopen(path, "we");
  if (!out) return CUDA_ERROR_OPERATING_SYSTEM;
  int clusters = 0;
  fprintf(out, "digraph dot {\n");
  print_dot(out, *g, flags != 0, &clusters);
  fprintf(out, "}\n");
  return fclose(out) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

}  // namespace devproxy::sa::graph
