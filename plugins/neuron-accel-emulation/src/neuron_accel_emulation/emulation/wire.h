// SPDX-License-Identifier: Apache-2.0
// What the device of a rank (device.c) and the process that executes for all ranks (broker.c) say to each other: 64-bit
// numbers and bytes over a socket of the Unix domain, in the byte order of the machine.
//
//   the device greets:   GREETING, rank, number of ranks
//   it sends a program:  PROGRAM, hash, bytes, code, bytes, options          answered: OK | FAILED, bytes, text
//   it has one executed: EXECUTE, hash, number of arguments, each an array   answered: OK, number of results, each an
//                                                                            array | FAILED, bytes, text
//   an array:            type, number of dims, dims, bytes, data

#ifndef NEURON_ACCEL_WIRE_H_
#define NEURON_ACCEL_WIRE_H_

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include "pjrt_c_api.h"

enum { GREETING = 0x6e656d75, PROGRAM = 1, EXECUTE = 2, OK = 3, FAILED = 4 };

enum { MOST_DIMS = 64 };

// All of it, or 0 once the other end has gone.
static inline int send_all(int socket, const void* data, size_t size) {
  const char* at = data;
  while (size) {
    ssize_t n = send(socket, at, size, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return 0;
    at += n;
    size -= n;
  }
  return 1;
}

static inline int receive_all(int socket, void* data, size_t size) {
  char* at = data;
  while (size) {
    ssize_t n = recv(socket, at, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return 0;
    at += n;
    size -= n;
  }
  return 1;
}

static inline int send_number(int socket, uint64_t value) { return send_all(socket, &value, sizeof value); }

static inline int receive_number(int socket, uint64_t* value) { return receive_all(socket, value, sizeof *value); }

static inline int send_bytes(int socket, const void* data, size_t size) {
  return send_number(socket, size) && send_all(socket, data, size);
}

// Memory that the caller frees, with a zero behind it; null once the other end has gone.
static inline char* receive_bytes(int socket, size_t* size) {
  uint64_t length;
  if (!receive_number(socket, &length)) return 0;
  char* data = malloc(length + 1);
  if (!data || !receive_all(socket, data, length)) {
    free(data);
    return 0;
  }
  data[length] = 0;
  *size = length;
  return data;
}

// ---- arrays to and from buffers -------------------------------------------------------------------------------------
// Each returns 0 once the other end has gone, and leaves an error of PJRT in *error if there is one.

static inline PJRT_Error* wait_for(const PJRT_Api* api, PJRT_Event* event) {
  PJRT_Event_Await_Args await = {0};
  await.struct_size = sizeof await;
  await.event = event;
  PJRT_Error* error = api->PJRT_Event_Await(&await);
  PJRT_Event_Destroy_Args destroy = {0};
  destroy.struct_size = sizeof destroy;
  destroy.event = event;
  api->PJRT_Event_Destroy(&destroy);
  return error;
}

static inline int send_buffer(int socket, const PJRT_Api* api, PJRT_Buffer* buffer, PJRT_Error** error) {
  PJRT_Buffer_ElementType_Args type = {0};
  type.struct_size = sizeof type;
  type.buffer = buffer;
  if ((*error = api->PJRT_Buffer_ElementType(&type))) return 1;
  PJRT_Buffer_Dimensions_Args dims = {0};
  dims.struct_size = sizeof dims;
  dims.buffer = buffer;
  if ((*error = api->PJRT_Buffer_Dimensions(&dims))) return 1;
  int64_t order[MOST_DIMS];
  if (dims.num_dims > MOST_DIMS) return 0;
  for (size_t i = 0; i < dims.num_dims; i++) order[i] = dims.num_dims - 1 - i;
  PJRT_Buffer_MemoryLayout layout = {0};
  layout.struct_size = sizeof layout;
  layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  layout.tiled.struct_size = sizeof layout.tiled;
  layout.tiled.minor_to_major = order;
  layout.tiled.minor_to_major_size = dims.num_dims;
  PJRT_Buffer_ToHostBuffer_Args copy = {0};
  copy.struct_size = sizeof copy;
  copy.src = buffer;
  copy.host_layout = &layout;
  if ((*error = api->PJRT_Buffer_ToHostBuffer(&copy))) return 1;
  char* data = malloc(copy.dst_size + 1);
  if (!data) return 0;
  copy.dst = data;
  if (!(*error = api->PJRT_Buffer_ToHostBuffer(&copy))) *error = wait_for(api, copy.event);
  int sent = 1;
  if (!*error)
    sent = send_number(socket, type.type) && send_bytes(socket, dims.dims, dims.num_dims * sizeof *dims.dims) &&
           send_bytes(socket, data, copy.dst_size);
  free(data);
  return sent;
}

static inline int receive_buffer(int socket, const PJRT_Api* api, PJRT_Client* client, PJRT_Device* device,
                                 PJRT_Buffer** buffer, PJRT_Error** error) {
  uint64_t type;
  size_t size;
  if (!receive_number(socket, &type)) return 0;
  char* dims = receive_bytes(socket, &size);
  if (!dims) return 0;
  PJRT_Client_BufferFromHostBuffer_Args make = {0};
  make.struct_size = sizeof make;
  make.client = client;
  make.device = device;
  make.type = type;
  make.dims = (const int64_t*)dims;
  make.num_dims = size / sizeof(int64_t);
  make.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  char* data = receive_bytes(socket, &size);
  if (data) {
    make.data = data;
    if (!(*error = api->PJRT_Client_BufferFromHostBuffer(&make))) {
      *buffer = make.buffer;
      *error = wait_for(api, make.done_with_host_buffer);
    }
  }
  free(dims);
  free(data);
  return data != 0;
}

#endif  // NEURON_ACCEL_WIRE_H_
