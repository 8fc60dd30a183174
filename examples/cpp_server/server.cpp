// Serves a package over TCP: server model.pt2 [port]. It prints its port; port 0, the default, takes a free one.
//
//   request   for each of model.inputs: its sizes (int64 each), its numbers
//             sizes below 0, or more than 1 GB of numbers: an error, then the connection ends
//   answer    int64 0, then for each of model.outputs: its sizes, its numbers; or int64 n > 0 and an error of n bytes
#include <malloc.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <thread>

#include "model.h"

bool read_all(FILE* from, void* data, size_t bytes) { return bytes == 0 || fread(data, 1, bytes, from) == bytes; }

bool read_tensor(FILE* from, const tilerec::TensorSpec& spec, at::Tensor& out) {
  std::vector<int64_t> sizes(spec.shape.size());
  if (!read_all(from, sizes.data(), 8 * sizes.size())) return false;
  double bytes = c10::elementSize(tilerec::scalar_type(spec.dtype));
  for (const int64_t size : sizes) {
    bytes *= std::max<int64_t>(size, 1);
    if (size < 0 || bytes > 1 << 30) throw std::runtime_error("Input '" + spec.name + "': got sizes below 0, or more than 1 GB; expected a smaller batch.");
  }
  out = at::empty(sizes, tilerec::scalar_type(spec.dtype));
  return read_all(from, out.data_ptr(), out.nbytes());
}

void answer(tilerec::Model& model, int connection) {
  FILE *in = fdopen(connection, "rb"), *out = fdopen(dup(connection), "wb");
  for (bool whole = true; whole;) {
    std::vector<at::Tensor> tensors(model.inputs.size()), results;
    std::string error;
    try {
      whole = false;  // until all of the request has been read
      for (size_t i = 0; i < tensors.size(); ++i)
        if (!read_tensor(in, model.inputs[i], tensors[i])) return fclose(in), fclose(out), void();
      whole = true;
      results = model.run(tensors);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    const int64_t length = static_cast<int64_t>(error.size());
    fwrite(&length, 8, 1, out), fwrite(error.data(), 1, error.size(), out);
    for (const at::Tensor& result : results) {
      const at::Tensor dense = result.contiguous();
      fwrite(dense.sizes().data(), 8, dense.dim(), out), fwrite(dense.data_ptr(), 1, dense.nbytes(), out);
    }
    fflush(out);
  }
  fclose(in), fclose(out);
}

int main(int count, char** words) try {
  signal(SIGPIPE, SIG_IGN);  // a client that leaves before its answer ends no server
  mallopt(M_MMAP_THRESHOLD, 1 << 30), mallopt(M_TRIM_THRESHOLD, 1 << 30);  // intermediate results reuse memory
  tilerec::Model model(count > 1 ? words[1] : "model.pt2");
  const int server = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in place{AF_INET, htons(count > 2 ? atoi(words[2]) : 0), {htonl(INADDR_LOOPBACK)}, {}};
  socklen_t size = sizeof place;
  if (bind(server, reinterpret_cast<sockaddr*>(&place), size) || listen(server, 64)) return perror("server"), 1;
  getsockname(server, reinterpret_cast<sockaddr*>(&place), &size);
  printf("port %d\n", ntohs(place.sin_port)), fflush(stdout);
  for (int connection; (connection = accept(server, nullptr, nullptr)) >= 0;)
    std::thread(answer, std::ref(model), connection).detach();
} catch (const std::exception& error) {
  return fprintf(stderr, "server: %s\n", error.what()), 1;
}
