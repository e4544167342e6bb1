// SPDX-License-Identifier: Apache-2.0
// Executes for the ranks of one launch: a client of XLA's CPU with one device for each rank, and a thread that acts for
// it. All compile a program once, and meet in its collectives as threads of one process do.
//
//   broker SOCKET RANKS PLUGIN GRACE_SECONDS PATIENCE_SECONDS
//
// It listens at SOCKET, which it removes once all ranks have come, and ends with the last of them. It ends at once if a
// rank goes while others stay in a program for more than GRACE_SECONDS, since they would wait for it forever, and if
// ranks are for PATIENCE_SECONDS in different programs, since those cannot meet.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/un.h>
#include <time.h>

#include "wire.h"

enum { SECONDS_FOR_ALL_TO_COME = 600, SECONDS_FOR_THE_NEXT = 60 };

typedef struct Program {
  struct Program* next;
  uint64_t hash;
  PJRT_LoadedExecutable* executable;  // null if it could not be compiled
  char* failure;
  size_t results;
} Program;

typedef struct Count {  // how often a rank has executed a program
  struct Count* next;
  uint64_t hash, count;
} Count;

typedef struct {
  int socket;
  uint64_t rank;
  PJRT_Device* device;
  atomic_llong began;  // of what it executes, in milliseconds; 0 if nothing
  atomic_ullong executes;
  Count* counts;
} Rank;

static const PJRT_Api* api;
static PJRT_Client* client;
static PJRT_Device* const* devices;
static Program* programs;
static pthread_mutex_t compiling = PTHREAD_MUTEX_INITIALIZER;
static Rank* ranks;
static int world, grace, patience;
static atomic_int came, left;
static atomic_llong left_at;

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static char* text_of(PJRT_Error* error) {
  PJRT_Error_Message_Args message = {0};
  message.struct_size = sizeof message;
  message.error = error;
  api->PJRT_Error_Message(&message);
  char* text = strndup(message.message, message.message_size);
  PJRT_Error_Destroy_Args destroy = {0};
  destroy.struct_size = sizeof destroy;
  destroy.error = error;
  api->PJRT_Error_Destroy(&destroy);
  return text;
}

static int answer_failure(int socket, const char* text) {
  return send_number(socket, FAILED) && send_bytes(socket, text, strlen(text));
}

static void compile(Program* program, char* code, size_t size, const char* options, size_t options_size) {
  PJRT_Program source = {0};
  source.struct_size = sizeof source;
  source.code = code;
  source.code_size = size;
  source.format = "hlo";
  source.format_size = 3;
  PJRT_Client_Compile_Args args = {0};
  args.struct_size = sizeof args;
  args.client = client;
  args.program = &source;
  args.compile_options = options;
  args.compile_options_size = options_size;
  PJRT_Error* error = api->PJRT_Client_Compile(&args);
  if (!error) {
    PJRT_LoadedExecutable_GetExecutable_Args get = {0};
    get.struct_size = sizeof get;
    get.loaded_executable = args.executable;
    error = api->PJRT_LoadedExecutable_GetExecutable(&get);
    if (!error) {
      PJRT_Executable_NumOutputs_Args outputs = {0};
      outputs.struct_size = sizeof outputs;
      outputs.executable = get.executable;
      error = api->PJRT_Executable_NumOutputs(&outputs);
      program->results = outputs.num_outputs;
    }
  }
  if (error)
    program->failure = text_of(error);
  else
    program->executable = args.executable;
}

static Program* find(uint64_t hash) {
  for (Program* p = programs; p; p = p->next)
    if (p->hash == hash) return p;
  return 0;
}

// A rank has compiled a program. The first one's is compiled here, while the others wait for it.
static int take_program(Rank* rank) {
  uint64_t hash;
  size_t size = 0, options_size = 0;
  char *code = 0, *options = 0;
  if (!receive_number(rank->socket, &hash) || !(code = receive_bytes(rank->socket, &size)) ||
      !(options = receive_bytes(rank->socket, &options_size))) {
    free(code);
    return 0;
  }
  pthread_mutex_lock(&compiling);
  Program* program = find(hash);
  if (!program) {
    program = calloc(1, sizeof *program);
    program->hash = hash;
    compile(program, code, size, options, options_size);
    program->next = programs;
    programs = program;
  }
  pthread_mutex_unlock(&compiling);
  free(code);
  free(options);
  return program->failure ? answer_failure(rank->socket, program->failure) : send_number(rank->socket, OK);
}

static uint64_t count(Rank* rank, uint64_t hash) {
  Count* c = rank->counts;
  while (c && c->hash != hash) c = c->next;
  if (!c) {
    c = calloc(1, sizeof *c);
    c->hash = hash;
    c->next = rank->counts;
    rank->counts = c;
  }
  return ++c->count;
}

static void destroy(PJRT_Buffer* buffer) {
  PJRT_Buffer_Destroy_Args args = {0};
  args.struct_size = sizeof args;
  args.buffer = buffer;
  if (buffer) api->PJRT_Buffer_Destroy(&args);
}

// Ranks meet by the launch: the same program, as often as they have executed it.
static PJRT_Error* run(Rank* rank, Program* program, PJRT_Buffer** arguments, size_t size, PJRT_Buffer** results) {
  PJRT_ExecuteOptions options = {0};
  options.struct_size = sizeof options;
  options.launch_id = (int)((program->hash * 31 + count(rank, program->hash) * 2) & 0x7ffffffe) + 1;
  PJRT_Buffer* const* lists[1] = {arguments};
  PJRT_Buffer** outputs[1] = {results};
  PJRT_Event* events[1] = {0};
  PJRT_LoadedExecutable_Execute_Args args = {0};
  args.struct_size = sizeof args;
  args.executable = program->executable;
  args.options = &options;
  args.argument_lists = lists;
  args.num_devices = 1;
  args.num_args = size;
  args.output_lists = outputs;
  args.device_complete_events = events;
  args.execute_device = rank->device;
  atomic_store(&rank->executes, program->hash);
  atomic_store(&rank->began, now());
  PJRT_Error* error = api->PJRT_LoadedExecutable_Execute(&args);
  if (!error) error = wait_for(api, events[0]);
  atomic_store(&rank->began, 0);
  return error;
}

static int execute(Rank* rank) {
  uint64_t hash, size;
  if (!receive_number(rank->socket, &hash) || !receive_number(rank->socket, &size)) return 0;
  PJRT_Buffer** arguments = calloc(size + 1, sizeof *arguments);
  PJRT_Error* error = 0;
  int there = arguments != 0;
  for (size_t i = 0; there && i < size; i++) {
    PJRT_Error* wrong = 0;
    there = receive_buffer(rank->socket, api, client, rank->device, &arguments[i], &wrong);
    if (wrong && !error) error = wrong;
  }
  pthread_mutex_lock(&compiling);
  Program* program = find(hash);
  pthread_mutex_unlock(&compiling);
  PJRT_Buffer** results = 0;
  if (there && !error && program && program->executable) {
    results = calloc(program->results + 1, sizeof *results);
    error = run(rank, program, arguments, size, results);
  }
  if (there && error) {
    char* text = text_of(error);
    there = answer_failure(rank->socket, text);
    free(text);
  } else if (there && !results) {
    there = answer_failure(rank->socket, "the program was not compiled");
  } else if (there) {
    there = send_number(rank->socket, OK) && send_number(rank->socket, program->results);
    for (size_t i = 0; there && i < program->results; i++)  // an error here would leave half an answer
      there = send_buffer(rank->socket, api, results[i], &error) && !error;
  }
  for (size_t i = 0; i < size; i++) destroy(arguments[i]);
  for (size_t i = 0; results && i < program->results; i++) destroy(results[i]);
  free(arguments);
  free(results);
  return there;
}

static void* serve(void* of) {
  Rank* rank = of;
  uint64_t request;
  while (receive_number(rank->socket, &request)) {
    int there = request == PROGRAM ? take_program(rank) : request == EXECUTE ? execute(rank) : 0;
    if (!there) break;
  }
  close(rank->socket);
  atomic_store(&left_at, now());
  atomic_fetch_add(&left, 1);
  return 0;
}

static void give_up(int waiting, const char* why) {
  fprintf(stderr, "emulated Neuron device: rank %d waits in a program, and %s\n", waiting, why);
  _exit(1);
}

// Ends this process when it has nothing to do any more, or can do nothing.
static void* watch(void* unused) {
  (void)unused;
  for (;;) {
    usleep(100000);
    int gone = atomic_load(&left);
    if (gone == world) _exit(0);
    if (gone && gone == atomic_load(&came) && now() - atomic_load(&left_at) > SECONDS_FOR_THE_NEXT * 1000LL) _exit(1);
    int first = -1;
    for (int i = 0; i < world; i++) {
      long long began = atomic_load(&ranks[i].began), since = began ? now() - began : 0;
      if (gone && since > grace * 1000LL && now() - atomic_load(&left_at) > grace * 1000LL)
        give_up(i, "another rank has ended");
      if (since < patience * 1000LL) continue;
      if (first < 0) first = i;
      if (atomic_load(&ranks[i].executes) != atomic_load(&ranks[first].executes))
        give_up(first, "others wait in another: ranks that take part in a collective must compile the same program");
    }
  }
}

static int start(const char* plugin) {
  void* library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
  if (!library) return fprintf(stderr, "emulated Neuron device: %s\n", dlerror()), 0;
  const PJRT_Api* (*entry)(void) = (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi");
  if (!entry) return fprintf(stderr, "emulated Neuron device: %s has no GetPjrtApi\n", plugin), 0;
  api = entry();
  PJRT_NamedValue number = {0};
  number.struct_size = sizeof number;
  number.name = "cpu_device_count";
  number.name_size = strlen(number.name);
  number.type = PJRT_NamedValue_kInt64;
  number.int64_value = world;
  number.value_size = 1;
  PJRT_Client_Create_Args create = {0};
  create.struct_size = sizeof create;
  create.create_options = &number;
  create.num_options = 1;
  PJRT_Error* error = api->PJRT_Client_Create(&create);
  if (error) return fprintf(stderr, "emulated Neuron device: %s\n", text_of(error)), 0;
  client = create.client;
  PJRT_Client_Devices_Args list = {0};
  list.struct_size = sizeof list;
  list.client = client;
  error = api->PJRT_Client_Devices(&list);
  if (error) return fprintf(stderr, "emulated Neuron device: %s\n", text_of(error)), 0;
  devices = list.devices;
  return (int)list.num_devices == world;
}

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  world = atoi(argv[2]);
  grace = atoi(argv[4]);
  patience = atoi(argv[5]);
  ranks = calloc(world, sizeof *ranks);
  struct sockaddr_un address = {0};
  address.sun_family = AF_UNIX;
  if (world < 1 || strlen(argv[1]) >= sizeof address.sun_path) return 2;
  strcpy(address.sun_path, argv[1]);
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, (void*)&address, sizeof address) || listen(listener, world)) {
    perror("emulated Neuron device");
    return 1;
  }
  if (!start(argv[3])) {
    unlink(argv[1]);
    return 1;
  }
  pthread_t thread;
  pthread_create(&thread, 0, watch, 0);
  long long deadline = now() + SECONDS_FOR_ALL_TO_COME * 1000LL;
  while (atomic_load(&came) < world) {
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    long long rest = deadline - now();
    if (rest <= 0 || poll(&ready, 1, rest) <= 0) {
      if (rest > 0 && errno == EINTR) continue;
      fprintf(stderr, "emulated Neuron device: %d of %d ranks came\n", atomic_load(&came), world);
      unlink(argv[1]);
      return 1;
    }
    int connection = accept4(listener, 0, 0, SOCK_CLOEXEC);
    uint64_t hello[3];
    if (connection < 0) continue;
    if (!receive_all(connection, hello, sizeof hello) || hello[0] != GREETING || hello[1] >= (uint64_t)world ||
        hello[2] != (uint64_t)world || ranks[hello[1]].device) {
      close(connection);
      continue;
    }
    Rank* rank = &ranks[hello[1]];
    rank->socket = connection;
    rank->rank = hello[1];
    rank->device = devices[hello[1]];
    if (pthread_create(&thread, 0, serve, rank)) return 1;
    atomic_fetch_add(&came, 1);
  }
  close(listener);
  unlink(argv[1]);
  pthread_exit(0);  // the watch ends the process
}
