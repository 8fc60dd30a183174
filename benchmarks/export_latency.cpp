// One measurement of benchmarks/export_latency.py: "export_latency model.pt2" reads lines "SAMPLES CALLS THREADS" and the
// inputs' file of each, and answers the nanoseconds of each call.
#include <ATen/Parallel.h>
#include <malloc.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>

#include "model.h"

int main(int, char** words) {
  mallopt(M_MMAP_THRESHOLD, 1 << 30), mallopt(M_TRIM_THRESHOLD, 1 << 30);
  tilerec::Model model(words[1]);
  std::string file;
  for (int calls, threads; std::cin >> file >> calls >> threads;) {
    at::set_num_threads(threads);
    std::ifstream in(file, std::ios::binary);
    std::vector<at::Tensor> tensors;
    for (const tilerec::TensorSpec& spec : model.inputs) {
      std::vector<int64_t> sizes(spec.shape.size());
      in.read(reinterpret_cast<char*>(sizes.data()), static_cast<std::streamsize>(8 * sizes.size()));
      tensors.push_back(at::empty(sizes, tilerec::scalar_type(spec.dtype)));
      in.read(static_cast<char*>(tensors.back().data_ptr()), static_cast<std::streamsize>(tensors.back().nbytes()));
    }
    for (int i = 0; i < calls; ++i) {
      const auto before = std::chrono::steady_clock::now();
      model.run(tensors);
      const auto after = std::chrono::steady_clock::now();
      std::cout << std::chrono::duration_cast<std::chrono::nanoseconds>(after - before).count() << ' ';
    }
    std::cout << std::endl;
  }
}
