// SPDX-License-Identifier: Apache-2.0
// A PJRT plugin that torch_xla takes for Neuron's: XLA's CPU plugin, seen by each process as one core of several.
//
// Every process sees NEURON_PJRT_WORLD_SIZE devices of the platform NEURON, of which NEURON_PJRT_PROCESS_INDEX is its
// own. What is compiled goes into a compile cache as the compiler's wrapper lays it out. What is executed
//   - with one rank runs here, on XLA's CPU;
//   - with several is executed by the broker (broker.c), which the first rank starts: collectives meet there;
//   - under NEURON_EXTRACT_GRAPHS_ONLY gives zeros, as Neuron's own plugin does.
// Where the broker executes, or nothing does, this process compiles no more of a program than its signature.
//
// Variables, besides Neuron's own:
//   NEURON_ACCEL_EMULATION         folder of the emulated machine: sockets, locks of cores, log; private to the user
//   NEURON_ACCEL_EMULATED_PLUGIN   XLA's CPU plugin
//   NEURON_ACCEL_EMULATED_BROKER   the broker's program
//   NEURON_ACCEL_EMULATED_CORES    number of cores of the machine
//   NEURON_ACCEL_EMULATED_PATIENCE seconds after which ranks that wait in different programs are given up; 30 if unset
//   NEURON_ACCEL_EMULATED_GRAPHS   folder that receives every program as rankR_NNN.hlo; none if unset

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "wire.h"

#define COMPILER "neuronxcc-0.0.0.0+emulated"

extern char** environ;

enum { SECONDS_TO_REACH_THE_BROKER = 120, MOST_CORES = 4096 };

static const PJRT_Api* api;  // of XLA's CPU plugin
static PJRT_Api own_api;
static int world = 1, rank = 0, extracting, core = -1;
static PJRT_Client* client;
static PJRT_Device* device;
static int broker = -1;
static pthread_mutex_t talking = PTHREAD_MUTEX_INITIALIZER;

static int delegates(void) { return extracting || world > 1; }  // executes nothing itself

static const char* variable(const char* name) {
  const char* value = getenv(name);
  return value && *value ? value : 0;
}

// ---- errors ---------------------------------------------------------------------------------------------------------
// Those made here are told from the plugin's by their address.

typedef struct Error {
  struct Error* next;
  char* text;
} Error;

static Error* errors;
static pthread_mutex_t erring = PTHREAD_MUTEX_INITIALIZER;

static PJRT_Error* fail(const char* format, ...) {
  Error* error = calloc(1, sizeof *error);
  va_list values;
  va_start(values, format);
  if (vasprintf(&error->text, format, values) < 0) error->text = strdup("no memory");
  va_end(values);
  pthread_mutex_lock(&erring);
  error->next = errors;
  errors = error;
  pthread_mutex_unlock(&erring);
  return (PJRT_Error*)error;
}

static Error* own(const PJRT_Error* error) {
  pthread_mutex_lock(&erring);
  Error* e = errors;
  while (e && e != (const Error*)error) e = e->next;
  pthread_mutex_unlock(&erring);
  return e;
}

static void error_destroy(PJRT_Error_Destroy_Args* args) {
  Error* error = own(args->error);
  if (!error) {
    api->PJRT_Error_Destroy(args);
    return;
  }
  pthread_mutex_lock(&erring);
  Error** at = &errors;
  while (*at != error) at = &(*at)->next;
  *at = error->next;
  pthread_mutex_unlock(&erring);
  free(error->text);
  free(error);
}

static void error_message(PJRT_Error_Message_Args* args) {
  Error* error = own(args->error);
  if (!error) {
    api->PJRT_Error_Message(args);
    return;
  }
  args->message = error->text;
  args->message_size = strlen(error->text);
}

static PJRT_Error* error_code(PJRT_Error_GetCode_Args* args) {
  if (!own(args->error)) return api->PJRT_Error_GetCode(args);
  args->code = PJRT_Error_Code_INTERNAL;
  return 0;
}

// ---- the machine: cores, the port where ranks meet, and the broker --------------------------------------------------

static void path_in(char* path, const char* format, ...) {
  char name[512];
  va_list values;
  va_start(values, format);
  vsnprintf(name, sizeof name, format, values);
  va_end(values);
  for (char* c = name; *c; c++)
    if (*c == '/') *c = '_';
  snprintf(path, 4096, "%s/%s", variable("NEURON_ACCEL_EMULATION"), name);
}

// Whether this process now has what the file stands for; it lets go when it ends. Processes that it forks do not hold
// a lock of fcntl, so that one which outlives it keeps nothing.
static int take(const char* path) {
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return 0;
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  return !fcntl(file, F_SETLK, &lock);
}

static PJRT_Error* take_core(void) {
  const char* cores = variable("NEURON_RT_VISIBLE_CORES");
  const char* number = variable("NEURON_ACCEL_EMULATED_CORES");
  int most = number ? atoi(number) : world;
  char* end = 0;
  core = cores ? (int)strtol(cores, &end, 10) : rank;
  if (end && *end) return fail("emulated Neuron device: a process drives one core, not NEURON_RT_VISIBLE_CORES=%s", cores);
  if (core < 0 || core >= most) return fail("emulated Neuron device: there is no core %d among %d", core, most);
  char path[4096];
  path_in(path, "core%d.lock", core);
  if (!take(path)) return fail("emulated Neuron device: another process uses core %d", core);
  const char* root = variable("NEURON_RT_ROOT_COMM_ID");
  if (world > 1 && rank == 0 && root) {
    path_in(path, "root-%s.lock", root);
    if (!take(path)) return fail("emulated Neuron device: another job meets at NEURON_RT_ROOT_COMM_ID=%s", root);
  }
  return 0;
}

static PJRT_Error* start_broker(const char* path, pid_t* pid) {
  const char* program = variable("NEURON_ACCEL_EMULATED_BROKER");
  const char* plugin = variable("NEURON_ACCEL_EMULATED_PLUGIN");
  const char* patience = variable("NEURON_ACCEL_EMULATED_PATIENCE");
  if (!program) return fail("emulated Neuron device: NEURON_ACCEL_EMULATED_BROKER names no program");
  char ranks[16];
  snprintf(ranks, sizeof ranks, "%d", world);
  char* arguments[] = {(char*)program, (char*)path, ranks, (char*)plugin, "10", (char*)(patience ? patience : "30"), 0};
  unlink(path);
  int failed = posix_spawn(pid, program, 0, 0, arguments, environ);
  return failed ? fail("emulated Neuron device: the broker does not start: %s", strerror(failed)) : 0;
}

// The ranks of one launch have one place where they meet, and so does their broker. A launch that begins again after a
// failure begins with another one.
static PJRT_Error* connect_to_broker(void) {
  char path[4096];
  const char *port = variable("MASTER_PORT"), *restart = variable("TORCHELASTIC_RESTART_COUNT");
  path_in(path, "broker-%s-%s", port ? port : "0", restart ? restart : "0");
  struct sockaddr_un address = {0};
  address.sun_family = AF_UNIX;
  if (strlen(path) >= sizeof address.sun_path) return fail("emulated Neuron device: %s is too long for a socket", path);
  strcpy(address.sun_path, path);
  pid_t pid = 0;
  PJRT_Error* error = rank == 0 ? start_broker(path, &pid) : 0;
  if (error) return error;
  for (int i = 0; i < SECONDS_TO_REACH_THE_BROKER * 20; i++) {
    broker = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(broker, (void*)&address, sizeof address)) {
      uint64_t hello[3] = {GREETING, rank, world};
      if (send_all(broker, hello, sizeof hello)) return 0;
    }
    close(broker);
    if (pid && waitpid(pid, 0, WNOHANG) == pid) return fail("emulated Neuron device: the broker has ended");
    usleep(50000);
  }
  return fail("emulated Neuron device: no broker after %d s; has rank 0 begun?", SECONDS_TO_REACH_THE_BROKER);
}

static PJRT_Error* lost(void) {
  return fail("emulated Neuron device: the broker has ended, because a rank has, or its own output says why");
}

// What the broker answers; on success the rest of it is still to be read.
static PJRT_Error* answer(void) {
  uint64_t word;
  if (!receive_number(broker, &word)) return lost();
  if (word == OK) return 0;
  size_t size;
  char* text = receive_bytes(broker, &size);
  PJRT_Error* error = text ? fail("%s", text) : lost();
  free(text);
  return error;
}

// ---- reading and writing protocol buffers ---------------------------------------------------------------------------

typedef struct {
  const unsigned char *at, *end;
} Message;

typedef struct {
  uint64_t number, value;  // value: of a number, or the length of bytes
  const unsigned char* bytes;
} Field;

typedef struct {
  unsigned char* data;
  size_t size, room;
} Text;

static uint64_t varint(Message* m) {
  uint64_t value = 0;
  for (int shift = 0; m->at < m->end && shift < 64; shift += 7) {
    unsigned char c = *m->at++;
    value |= (uint64_t)(c & 127) << shift;
    if (c < 128) break;
  }
  return value;
}

static int next(Message* m, Field* f) {
  if (m->at >= m->end) return 0;
  uint64_t key = varint(m);
  f->number = key >> 3;
  f->bytes = 0;
  switch (key & 7) {
    case 0:
      f->value = varint(m);
      return 1;
    case 1:
    case 5:
      f->value = (key & 7) == 1 ? 8 : 4;
      break;
    case 2:
      f->value = varint(m);
      break;
    default:
      return 0;
  }
  if (f->value > (uint64_t)(m->end - m->at)) return 0;
  f->bytes = m->at;
  m->at += f->value;
  return 1;
}

static Message message(Field f) { return (Message){f.bytes, f.bytes + f.value}; }

static int is(Field f, const char* text) { return f.value == strlen(text) && !memcmp(f.bytes, text, f.value); }

static void put(Text* t, const void* data, size_t size) {
  if (t->size + size > t->room) {
    t->room = (t->size + size) * 2;
    t->data = realloc(t->data, t->room);
  }
  if (size) memcpy(t->data + t->size, data, size);
  t->size += size;
}

static void put_varint(Text* t, uint64_t value) {
  do {
    unsigned char c = (value & 127) | (value > 127 ? 128 : 0);
    put(t, &c, 1);
  } while (value >>= 7);
}

static void put_number(Text* t, uint64_t field, uint64_t value) {
  put_varint(t, field << 3);
  put_varint(t, value);
}

static void put_bytes(Text* t, uint64_t field, const void* data, size_t size) {
  put_varint(t, field << 3 | 2);
  put_varint(t, size);
  put(t, data, size);
}

static void put_text(Text* t, uint64_t field, const char* text) { put_bytes(t, field, text, strlen(text)); }

// ---- a program's signature: the same parameters, and zeros for results ----------------------------------------------
// Numbers of fields are those of xla/service/hlo.proto and xla/xla_data.proto.

enum { MODULE_ENTRY = 6, MODULE_COMPUTATION = 3, COMPUTATION_INSTRUCTION = 2, COMPUTATION_ID = 5, COMPUTATION_ROOT = 6 };
enum { INSTRUCTION_NAME = 1, OPCODE = 2, SHAPE = 3, LITERAL = 8, INSTRUCTION_ID = 35, OPERANDS = 36 };
enum { ELEMENT_TYPE = 2, TUPLE_SHAPES = 4, LAYOUT = 5, S32 = 4, LITERAL_S32 = 4 };

static uint64_t number_in(Message m, uint64_t field) {
  for (Field f; next(&m, &f);)
    if (f.number == field) return f.value;
  return 0;
}

static Field bytes_in(Message m, uint64_t field) {
  for (Field f; next(&m, &f);)
    if (f.number == field && f.bytes) return f;
  return (Field){0, 0, (const unsigned char*)""};
}

static uint64_t put_instruction(Text* body, uint64_t* id, const char* opcode, const void* shape, size_t size,
                                const Text* rest) {
  Text t = {0};
  char name[64];
  snprintf(name, sizeof name, "signature.%llu", (unsigned long long)++*id);
  put_text(&t, INSTRUCTION_NAME, name);
  put_text(&t, OPCODE, opcode);
  put_bytes(&t, SHAPE, shape, size);
  put_number(&t, INSTRUCTION_ID, *id);
  if (rest) put(&t, rest->data, rest->size);
  put_bytes(body, COMPUTATION_INSTRUCTION, t.data, t.size);
  free(t.data);
  return *id;
}

static uint64_t put_unary(Text* body, uint64_t* id, const char* opcode, const void* shape, size_t size, uint64_t of) {
  Text rest = {0};
  put_number(&rest, OPERANDS, of);
  uint64_t made = put_instruction(body, id, opcode, shape, size, &rest);
  free(rest.data);
  return made;
}

// A result of zeros: 0 converted to its type, spread over its shape.
static uint64_t put_zeros(Text* body, uint64_t* id, uint64_t zero, Field shape) {
  Text scalar = {0};
  put_number(&scalar, ELEMENT_TYPE, number_in(message(shape), ELEMENT_TYPE));
  put_bytes(&scalar, LAYOUT, "", 0);
  uint64_t converted = put_unary(body, id, "convert", scalar.data, scalar.size, zero);
  free(scalar.data);
  return put_unary(body, id, "broadcast", shape.bytes, shape.value, converted);
}

static void put_entry(Text* module, Message computation) {
  Text body = {0}, zero = {0}, scalar = {0}, operands = {0};
  uint64_t root = number_in(computation, COMPUTATION_ROOT), id = 0;
  Field shape = {0};
  Message m = computation;
  for (Field f; next(&m, &f);) {
    if (f.number != COMPUTATION_INSTRUCTION) {
      if (f.number != COMPUTATION_ROOT && f.bytes)
        put_bytes(&body, f.number, f.bytes, f.value);
      else if (f.number != COMPUTATION_ROOT)
        put_number(&body, f.number, f.value);
      continue;
    }
    uint64_t number = number_in(message(f), INSTRUCTION_ID);
    if (number > id) id = number;
    if (number == root) shape = bytes_in(message(f), SHAPE);
    if (is(bytes_in(message(f), OPCODE), "parameter")) put_bytes(&body, f.number, f.bytes, f.value);
  }
  put_number(&scalar, ELEMENT_TYPE, S32);
  put_bytes(&scalar, LAYOUT, "", 0);
  Text literal = {0};
  put_bytes(&literal, 1, scalar.data, scalar.size);
  put_number(&literal, LITERAL_S32, 0);
  put_bytes(&zero, LITERAL, literal.data, literal.size);
  uint64_t constant = put_instruction(&body, &id, "constant", scalar.data, scalar.size, &zero);
  if (number_in(message(shape), ELEMENT_TYPE) == 13) {  // a tuple
    Message elements = message(shape);
    for (Field f; next(&elements, &f);)
      if (f.number == TUPLE_SHAPES) put_number(&operands, OPERANDS, put_zeros(&body, &id, constant, f));
    root = put_instruction(&body, &id, "tuple", shape.bytes, shape.value, &operands);
  } else {
    root = put_zeros(&body, &id, constant, shape);
  }
  put_number(&body, COMPUTATION_ROOT, root);
  put_bytes(module, MODULE_COMPUTATION, body.data, body.size);
  free(body.data);
  free(zero.data);
  free(literal.data);
  free(scalar.data);
  free(operands.data);
}

static Text signature(const char* code, size_t size) {
  Message m = {(const unsigned char*)code, (const unsigned char*)code + size};
  uint64_t entry = number_in(m, MODULE_ENTRY);
  Text module = {0};
  for (Field f; next(&m, &f);) {
    if (f.number == MODULE_COMPUTATION && number_in(message(f), COMPUTATION_ID) == entry)
      put_entry(&module, message(f));
    else if (f.number <= 5 && f.number != MODULE_COMPUTATION && f.bytes)  // names, and the shape of the whole
      put_bytes(&module, f.number, f.bytes, f.value);
    else if (!f.bytes && (f.number == 5 || f.number == MODULE_ENTRY))
      put_number(&module, f.number, f.value);
  }
  return module;
}

// ---- the compile cache ----------------------------------------------------------------------------------------------

static uint64_t hash(const void* data, size_t size) {  // FNV-1a
  uint64_t value = 14695981039346656037u;
  for (size_t i = 0; i < size; i++) value = (value ^ ((const unsigned char*)data)[i]) * 1099511628211u;
  return value;
}

static void write_file(const char* folder, const char* name, const void* data, size_t size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return;
  for (const char* at = data; size;) {
    ssize_t n = write(file, at, size);
    if (n <= 0) break;
    at += n;
    size -= n;
  }
  close(file);
}

static void make_folders(const char* path) {
  char part[4096];
  snprintf(part, sizeof part, "%s", path);
  for (char* c = part + 1; *c; c++)
    if (*c == '/') {
      *c = 0;
      mkdir(part, 0755);
      *c = '/';
    }
  mkdir(part, 0755);
}

// NEURON_CC_FLAGS, sorted: the cache's own into *place and *off, the compiler's as a list of JSON.
static Text compiler_flags(char* place, int* off) {
  Text flags = {0};
  char* text = strdup(variable("NEURON_CC_FLAGS") ? variable("NEURON_CC_FLAGS") : "");
  char *rest = text, *word;
  put(&flags, "[", 1);
  while ((word = strsep(&rest, " \t"))) {
    if (!*word) continue;
    if (!strncmp(word, "--cache_dir=", 12))
      snprintf(place, 2048, "%s", word + 12);
    else if (!strcmp(word, "--cache_dir") && (word = strsep(&rest, " \t")))
      snprintf(place, 2048, "%s", word);
    else if (!strcmp(word, "--no_cache"))
      *off = 1;
    else if (strcmp(word, "--retry_failed_compilation") && strncmp(word, "--log_level", 11)) {
      if (flags.size > 1) put(&flags, ", ", 2);
      put(&flags, "\"", 1);
      for (char* c = word; *c; c++) {
        if (*c == '"' || *c == '\\') put(&flags, "\\", 1);
        put(&flags, c, 1);
      }
      put(&flags, "\"", 1);
    }
  }
  put(&flags, "]", 1);
  free(text);
  return flags;
}

static void note(const char* what, const char* module) {
  char path[4096], line[512];
  path_in(path, "compilations");
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  int size = snprintf(line, sizeof line, "%s %d %s\n", what, rank, module);
  if (file >= 0) {
    ssize_t written = write(file, line, size);
    (void)written;
    close(file);
  }
}

// Looks a program up and leaves it in the cache: in a trial what is to be compiled, otherwise as if it had been.
static void keep_in_cache(const char* code, size_t size) {
  char place[2048] = "", entry[3072], temporary[3200], done[3200], module[64];
  int off = 0;
  Text flags = compiler_flags(place, &off);
  if (!*place) {
    const char* url = variable("NEURON_COMPILE_CACHE_URL");
    snprintf(place, sizeof place, "%s", url ? url : "/var/tmp/neuron-compile-cache");
    if (!strncmp(place, "file://", 7)) memmove(place, place + 7, strlen(place) - 6);
  }
  snprintf(module, sizeof module, "MODULE_%llu+%08x", (unsigned long long)hash(code, size),
           (unsigned)hash(flags.data, flags.size));
  snprintf(entry, sizeof entry, "%s/" COMPILER "/%s", place, module);
  snprintf(done, sizeof done, "%s/model.done", entry);
  off |= strstr(place, "://") != 0;
  int hit = !off && !access(done, F_OK);
  note(extracting ? "collected" : hit ? "found" : "compiled", module);
  if (!off && !hit) {
    snprintf(temporary, sizeof temporary, "%s/" COMPILER "/.%s.%d.%llu", place, module, (int)getpid(),
             (unsigned long long)hash(&code, sizeof code));
    make_folders(temporary);
    write_file(temporary, "model.hlo_module.pb", code, size);
    write_file(temporary, "compile_flags.json", flags.data, flags.size);
    if (!extracting) {
      write_file(temporary, "model.neff", "emulated\n", 9);
      write_file(temporary, "model.done", "", 0);
    }
    if (rename(temporary, entry)) {  // another rank was first, or the trial has left it without a result
      if (!extracting) {
        write_file(entry, "model.neff", "emulated\n", 9);
        write_file(entry, "model.done", "", 0);
      }
      const char* names[] = {"model.hlo_module.pb", "compile_flags.json", "model.neff", "model.done"};
      for (int i = 0; i < 4; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", temporary, names[i]);
        unlink(path);
      }
      rmdir(temporary);
    }
  }
  free(flags.data);
}

static void keep_graph(const PJRT_Program* program) {
  static int count;
  const char* folder = variable("NEURON_ACCEL_EMULATED_GRAPHS");
  char name[64];
  snprintf(name, sizeof name, "rank%d_%03d.hlo", rank, __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED));
  if (folder) write_file(folder, name, program->code, program->code_size);
}

// ---- programs -------------------------------------------------------------------------------------------------------

typedef struct Program {
  struct Program* next;
  PJRT_LoadedExecutable* executable;
  uint64_t hash;
} Program;

static Program* programs;
static pthread_mutex_t listing = PTHREAD_MUTEX_INITIALIZER;

static void remember(PJRT_LoadedExecutable* executable, uint64_t value) {
  Program* program = calloc(1, sizeof *program);
  program->executable = executable;
  program->hash = value;
  pthread_mutex_lock(&listing);
  program->next = programs;
  programs = program;
  pthread_mutex_unlock(&listing);
}

static uint64_t hash_of(PJRT_LoadedExecutable* executable) {
  pthread_mutex_lock(&listing);
  Program* p = programs;
  while (p && p->executable != executable) p = p->next;
  pthread_mutex_unlock(&listing);
  return p ? p->hash : 0;
}

static PJRT_Error* executable_destroy(PJRT_LoadedExecutable_Destroy_Args* args) {
  pthread_mutex_lock(&listing);
  for (Program** at = &programs; *at; at = &(*at)->next)
    if ((*at)->executable == args->executable) {
      Program* program = *at;
      *at = program->next;
      free(program);
      break;
    }
  pthread_mutex_unlock(&listing);
  return api->PJRT_LoadedExecutable_Destroy(args);
}

static PJRT_Error* send_program(uint64_t value, const PJRT_Client_Compile_Args* args) {
  pthread_mutex_lock(&talking);
  int sent = send_number(broker, PROGRAM) && send_number(broker, value) &&
             send_bytes(broker, args->program->code, args->program->code_size) &&
             send_bytes(broker, args->compile_options, args->compile_options_size);
  PJRT_Error* error = sent ? answer() : lost();
  pthread_mutex_unlock(&talking);
  return error;
}

static PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  const PJRT_Program* program = args->program;
  if (program->format_size != 3 || memcmp(program->format, "hlo", 3))
    return fail("emulated Neuron device: programs come as hlo, not as %.*s", (int)program->format_size, program->format);
  keep_graph(program);
  keep_in_cache(program->code, program->code_size);
  if (!delegates()) return api->PJRT_Client_Compile(args);
  uint64_t value = hash(program->code, program->code_size);
  PJRT_Error* error = extracting ? 0 : send_program(value, args);
  if (error) return error;
  Text short_form = signature(program->code, program->code_size);
  PJRT_Program own_program = *program;
  own_program.code = (char*)short_form.data;
  own_program.code_size = short_form.size;
  args->program = &own_program;
  error = api->PJRT_Client_Compile(args);
  args->program = program;
  free(short_form.data);
  if (!error) remember(args->executable, value);
  return error;
}

// Runs the program here: all of it with one rank, its signature in a trial. The caller's options may be those of an
// older version, and shorter.
static PJRT_Error* execute_here(PJRT_LoadedExecutable_Execute_Args* args) {
  PJRT_ExecuteOptions options = {0}, *given = args->options;
  memcpy(&options, given, given->struct_size < sizeof options ? given->struct_size : sizeof options);
  options.struct_size = sizeof options;
  args->options = &options;
  PJRT_Error* error = api->PJRT_LoadedExecutable_Execute(args);
  args->options = given;
  return error;
}

static PJRT_Error* receive_results(PJRT_LoadedExecutable_Execute_Args* args) {
  uint64_t results;
  PJRT_Error *error = answer(), *first = 0;
  if (error) return error;
  if (!receive_number(broker, &results)) return lost();
  for (uint64_t i = 0; i < results; i++) {
    error = 0;
    if (!receive_buffer(broker, api, client, device, &args->output_lists[0][i], &error)) return lost();
    if (error && !first) first = error;
  }
  if (first || !args->device_complete_events) return first;
  PJRT_Buffer_ReadyEvent_Args ready = {0};
  ready.struct_size = sizeof ready;
  ready.buffer = results ? args->output_lists[0][0] : args->argument_lists[0][0];
  error = api->PJRT_Buffer_ReadyEvent(&ready);
  args->device_complete_events[0] = ready.event;
  return error;
}

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  if (extracting || world == 1) return execute_here(args);
  if (args->num_devices != 1) return fail("emulated Neuron device: a process executes on its own core");
  pthread_mutex_lock(&talking);
  PJRT_Error* error = 0;
  int sent = send_number(broker, EXECUTE) && send_number(broker, hash_of(args->executable)) &&
             send_number(broker, args->num_args);
  for (size_t i = 0; sent && !error && i < args->num_args; i++)
    sent = send_buffer(broker, api, args->argument_lists[0][i], &error);
  if (error) shutdown(broker, SHUT_RDWR);  // half a request: the broker must not wait for the rest
  if (!error) error = sent ? receive_results(args) : lost();
  pthread_mutex_unlock(&talking);
  return error;
}

// ---- what a process sees of the client ------------------------------------------------------------------------------

static PJRT_Error* create(PJRT_Client_Create_Args* args) {
  PJRT_Error* error = extracting ? 0 : take_core();
  if (error) return error;
  PJRT_NamedValue number = {0};
  number.struct_size = sizeof number;
  number.name = "cpu_device_count";
  number.name_size = strlen(number.name);
  number.type = PJRT_NamedValue_kInt64;
  number.int64_value = world;
  number.value_size = 1;
  PJRT_Client_Create_Args real = {0};
  real.struct_size = sizeof real;
  real.create_options = &number;
  real.num_options = 1;
  if ((error = api->PJRT_Client_Create(&real))) return error;
  PJRT_Client_Devices_Args list = {0};
  list.struct_size = sizeof list;
  list.client = real.client;
  if ((error = api->PJRT_Client_Devices(&list))) return error;
  if ((int)list.num_devices != world) return fail("emulated Neuron device: %zu devices instead of %d", list.num_devices, world);
  device = list.devices[rank];
  args->client = client = real.client;
  return !extracting && world > 1 ? connect_to_broker() : 0;
}

static PJRT_Error* platform_name(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = "NEURON";
  args->platform_name_size = 6;
  return 0;
}

static PJRT_Error* process_index(PJRT_Client_ProcessIndex_Args* args) {
  args->process_index = rank;
  return 0;
}

static PJRT_Error* addressable_devices(PJRT_Client_AddressableDevices_Args* args) {
  args->addressable_devices = &device;
  args->num_addressable_devices = 1;
  return 0;
}

static PJRT_Error* executable_devices(PJRT_LoadedExecutable_AddressableDevices_Args* args) {
  args->addressable_devices = &device;
  args->num_addressable_devices = 1;
  return 0;
}

static PJRT_Error* is_addressable(PJRT_Device_IsAddressable_Args* args) {
  args->is_addressable = args->device == device;
  return 0;
}

static PJRT_Error* device_process(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  PJRT_DeviceDescription_Id_Args id = {0};
  id.struct_size = sizeof id;
  id.device_description = args->device_description;
  PJRT_Error* error = api->PJRT_DeviceDescription_Id(&id);
  args->process_index = id.id;
  return error;
}

const PJRT_Api* GetPjrtApi(void) {
  if (api) return &own_api;
  const char *plugin = variable("NEURON_ACCEL_EMULATED_PLUGIN"), *ranks = variable("NEURON_PJRT_WORLD_SIZE");
  const char *index = variable("NEURON_PJRT_PROCESS_INDEX"), *only = variable("NEURON_EXTRACT_GRAPHS_ONLY");
  if (ranks) world = atoi(ranks);
  if (ranks && index) rank = atoi(index);
  extracting = only && strcmp(only, "0") != 0;
  void* library = plugin ? dlopen(plugin, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND) : 0;
  const PJRT_Api* (*entry)(void) = library ? (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi") : 0;
  if (!entry || !variable("NEURON_ACCEL_EMULATION") || world < 1 || world > MOST_CORES || rank < 0 || rank >= world) {
    fprintf(stderr, "emulated Neuron device: %s\n", library || !plugin ? "its variables are not set" : dlerror());
    return 0;
  }
  api = entry();
  memcpy(&own_api, api, api->struct_size < sizeof own_api ? api->struct_size : sizeof own_api);
  own_api.PJRT_Error_Destroy = error_destroy;
  own_api.PJRT_Error_Message = error_message;
  own_api.PJRT_Error_GetCode = error_code;
  own_api.PJRT_Client_Create = create;
  own_api.PJRT_Client_PlatformName = platform_name;
  own_api.PJRT_Client_ProcessIndex = process_index;
  own_api.PJRT_Client_AddressableDevices = addressable_devices;
  own_api.PJRT_Client_Compile = compile;
  own_api.PJRT_Device_IsAddressable = is_addressable;
  own_api.PJRT_DeviceDescription_ProcessIndex = device_process;
  own_api.PJRT_LoadedExecutable_AddressableDevices = executable_devices;
  own_api.PJRT_LoadedExecutable_Destroy = executable_destroy;
  own_api.PJRT_LoadedExecutable_Execute = execute;
  return &own_api;
}
